#include "evaluation.h"

#include <reprise/memory/bytes.h>
#include <reprise/plan/planner.h>
#include <reprise/recompute/strategy.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <tuple>
#include <utility>

namespace reprise {
namespace {

using plan_detail::Evaluator;

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max() / 4;
// Sizes tried at most; beyond that they are thinned out evenly by ratio.
constexpr size_t kMostSizes = 20;
// How often the choice may lead to a measurement that changes the choice.
constexpr int kMostRounds = 6;
constexpr int kFrontierPoints = 24;  // of each micro-batch size

/// Sizes b with which N samples make ceil(N/b) micro-batches, for every number
/// of micro-batches: any other size makes as many, and larger ones.
std::vector<int64_t> candidate_sizes(const PlanRequest& request) {
  if (request.micro_batch > 0) return {request.micro_batch};
  const int64_t n = request.global_batch;
  std::set<int64_t> sizes;
  for (int64_t k = 1; k <= n; ++k) sizes.insert((n + k - 1) / k);
  std::vector<int64_t> list(sizes.begin(), sizes.end());
  if (list.size() <= kMostSizes) return list;
  std::vector<int64_t> thinned;
  const double ratio =
      std::pow(static_cast<double>(n), 1.0 / double(kMostSizes - 1));
  double next = 1;
  for (const int64_t size : list) {
    if (static_cast<double>(size) < next && size != n) continue;
    thinned.push_back(size);
    next = static_cast<double>(size) * ratio;
  }
  return thinned;
}

/// What was found at one precision and micro-batch size.
struct Choice {
  std::string precision;
  int64_t micro_batch = 0;
  std::optional<Plan> plan;  // the fastest that fits
  Plan smallest;             // whatever the budget
};

class Planner {
 public:
  Planner(const PlanRequest& request, CostSource& costs)
      : request_(request),
        costs_(costs),
        sizes_(candidate_sizes(request)),
        budget_(request.memory > 0
                    ? static_cast<int64_t>(static_cast<double>(request.memory) *
                                           (1 - request.margin))
                    : kNoLimit) {}

  PlanResult run() {
    for (const auto& precision : request_.precisions) begin(precision);
    consider_all();
    for (int round = 0; round < kMostRounds;) {
      const auto found = measure_what_was_chosen();
      if (!found) break;
      consider_all();
      // A size without room rules itself out; a measured one is a round.
      if (*found) ++round;
    }
    return answer();
  }

 private:
  using Key = std::pair<std::string, int64_t>;

  /// Measures the smallest size and, by steps of four, those that may fit.
  void begin(const std::string& precision) {
    int64_t last = 0;  // measured
    for (const int64_t size : sizes_) {
      const bool end = size == sizes_.back();
      if (size < 4 * last && !end) continue;
      const auto& profile = costs_.profile(precision);
      if (profile.sizes.size() >= 2 && !may_fit(profile, size)) break;
      if (measure(precision, size)) {
        last = size;
      } else if (cannot_run_.count(size) == 0) {
        break;
      }
    }
  }

  /// Where the device has no room for a size, it has none for larger ones. A
  /// size that cannot be run at all is passed over, unless it is the last.
  bool measure(const std::string& precision, int64_t size) {
    try {
      if (costs_.measure(precision, size)) return true;
    } catch (const c10::Error&) {
      if (size == sizes_.back()) throw;
      cannot_run_.insert(size);
      return false;
    }
    const auto known = too_large_.emplace(precision, size).first;
    known->second = std::min(known->second, size);
    return false;
  }

  /// For what the answer does not rest on.
  bool can_measure(const std::string& precision, int64_t size) {
    try {
      return costs_.measure(precision, size);
    } catch (const c10::Error&) {
      return false;
    }
  }

  bool can_try(const std::string& precision, int64_t size) const {
    const int64_t rest = request_.global_batch % size;
    if (cannot_run_.count(size) > 0 || cannot_run_.count(rest) > 0) {
      return false;
    }
    const auto known = too_large_.find(precision);
    return known == too_large_.end() || size < known->second;
  }

  /// By what is known so far: a stage alone, with nothing else kept.
  bool may_fit(const CostProfile& profile, int64_t size) const {
    const SizeCosts costs = profile.at(size);
    int64_t most = 0;
    for (const auto& stage : costs.figures.stages) {
      most = std::max(most, stage.saved_bytes + stage.backward_extra_bytes);
    }
    return profile.fixed.total() + costs.data_bytes + most <= budget_;
  }

  void consider_all() {
    choices_.clear();
    for (const auto& precision : request_.precisions) {
      const CostProfile& profile = costs_.profile(precision);
      if (profile.sizes.empty()) continue;
      for (const int64_t size : sizes_) {
        if (!can_try(precision, size)) continue;
        choices_.push_back(consider(precision, profile, size));
      }
    }
  }

  Choice consider(const std::string& precision, const CostProfile& profile,
                  int64_t size) {
    const Evaluator& evaluator = evaluator_for(precision, profile, size);
    Choice choice{precision, size, evaluator.fastest(budget_),
                  evaluator.smallest()};
    return choice;
  }

  /// Solving takes a while, so one for each size until more is measured.
  const Evaluator& evaluator_for(const std::string& precision,
                                 const CostProfile& profile, int64_t size) {
    const Key key{precision, size};
    const auto found = evaluators_.find(key);
    const size_t known = profile.sizes.size();
    if (found != evaluators_.end() && found->second.first == known) {
      return *found->second.second;
    }
    auto evaluator = std::make_unique<Evaluator>(
        profile, size, request_.global_batch, request_.strategy);
    auto& place = evaluators_[key];
    place = {known, std::move(evaluator)};
    return *place.second;
  }

  const Choice* best() const {
    const Choice* best = nullptr;
    for (const Choice& choice : choices_) {
      if (!choice.plan) continue;
      if (best == nullptr || choice.plan->step_ms < best->plan->step_ms) {
        best = &choice;
      }
    }
    return best;
  }

  const Choice* least() const {
    const Choice* least = nullptr;
    for (const Choice& choice : choices_) {
      if (least == nullptr ||
          choice.smallest.peak_bytes < least->smallest.peak_bytes) {
        least = &choice;
      }
    }
    return least;
  }

  /// Nothing where all that the answer rests on was measured; else whether it
  /// could be.
  std::optional<bool> measure_what_was_chosen() {
    const Choice* chosen = best();
    if (chosen == nullptr) chosen = least();
    TORCH_CHECK(chosen != nullptr, "[make_plan] not even a micro-batch of ",
                sizes_.front(), " fits on the device");
    const auto& precision = chosen->precision;
    if (costs_.profile(precision).measured(chosen->micro_batch)) {
      return std::nullopt;
    }
    return measure(precision, chosen->micro_batch);
  }

  PlanResult answer() {
    const Choice* chosen = best();
    const bool feasible = chosen != nullptr;
    if (!feasible) chosen = least();
    TORCH_CHECK(chosen != nullptr, "[make_plan] no size could be measured");
    PlanResult result{request_,
                      feasible,
                      feasible ? *chosen->plan : chosen->smallest,
                      {},
                      {},
                      {},
                      {},
                      costs_.profile(chosen->precision).stages,
                      with_margin(least()->smallest.peak_bytes)};
    for (const Choice& choice : choices_) {
      if (choice.plan && &choice != chosen) {
        result.alternatives.push_back(*choice.plan);
      }
    }
    std::sort(
        result.alternatives.begin(), result.alternatives.end(),
        [](const Plan& a, const Plan& b) { return a.step_ms < b.step_ms; });
    if (!request_.explain) return result;
    result.frontier = frontier();
    result.references = references(result.plan);
    result.measures = measures(*chosen, result.plan);
    return result;
  }

  /// The budget that such a peak needs.
  int64_t with_margin(int64_t peak_bytes) const {
    return static_cast<int64_t>(std::ceil(
        (static_cast<double>(peak_bytes) + 1) / (1 - request_.margin)));
  }

  std::vector<FrontierPoint> frontier() {
    std::vector<FrontierPoint> all;
    for (const Choice& choice : choices_) {
      const auto& evaluator =
          *evaluators_.at({choice.precision, choice.micro_batch}).second;
      for (const Plan& plan : evaluator.frontier(kFrontierPoints)) {
        all.push_back({plan.peak_bytes, plan.step_ms, plan.micro_batch, {}});
      }
    }
    std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
      return std::tie(a.peak_bytes, a.step_ms) <
             std::tie(b.peak_bytes, b.step_ms);
    });
    std::vector<FrontierPoint> front;
    for (const FrontierPoint& point : all) {
      if (front.empty() || point.step_ms < front.back().step_ms) {
        front.push_back(point);
      }
    }
    return front;
  }

  std::vector<FrontierPoint> references(const Plan& plan) {
    std::vector<FrontierPoint> list;
    std::set<int64_t> sizes{plan.micro_batch, request_.global_batch};
    for (const int64_t size : sizes) {
      const auto& profile = costs_.profile(plan.precision);
      const Evaluator& evaluator = evaluator_for(plan.precision, profile, size);
      for (const char* name : {"none", "all", "sqrt"}) {
        const Plan there = evaluator.of_strategy(name);
        list.push_back({there.peak_bytes, there.step_ms, size, name});
      }
    }
    return list;
  }

  std::vector<Measure> measures(const Choice& chosen, const Plan& plan) {
    std::vector<Measure> list;
    const auto add = [&](std::string what, const Plan& there) {
      if (there.peak_bytes >= plan.peak_bytes) return;
      list.push_back({std::move(what), there.peak_bytes, there.step_ms});
    };
    add("recompute more, at the same micro-batch", chosen.smallest);
    const Choice* smaller = nullptr;
    for (const Choice& choice : choices_) {
      if (choice.precision == chosen.precision &&
          choice.micro_batch < chosen.micro_batch) {
        smaller = &choice;  // the sizes rise
      }
    }
    if (smaller != nullptr) {
      add(fmt::format("micro-batch {} instead of {}", smaller->micro_batch,
                      chosen.micro_batch),
          smaller->smallest);
    }
    if (chosen.precision == "fp32" && (!chosen.plan || plan.peak.is_floor) &&
        can_measure("bf16", chosen.micro_batch)) {
      add("bf16 instead of fp32",
          evaluator_for("bf16", costs_.profile("bf16"), chosen.micro_batch)
              .smallest());
    }
    const auto& profile = costs_.profile(chosen.precision);
    if (profile.fixed.optimizer > 0) {
      Plan lean = plan;
      lean.peak_bytes -= profile.fixed.optimizer;
      lean.step_ms = 0;
      add("an optimizer without state (sgd)", lean);
    }
    return list;
  }

  const PlanRequest& request_;
  CostSource& costs_;
  std::vector<int64_t> sizes_;
  int64_t budget_;
  std::vector<Choice> choices_;
  std::map<std::string, int64_t> too_large_;  // the smallest such size
  std::set<int64_t> cannot_run_;
  std::map<Key, std::pair<size_t, std::unique_ptr<Evaluator>>> evaluators_;
};

}  // namespace

PlanResult make_plan(const PlanRequest& request, CostSource& costs) {
  TORCH_CHECK(request.global_batch > 0,
              "[make_plan] expected a global batch above 0, got ",
              request.global_batch);
  TORCH_CHECK(
      request.micro_batch >= 0 && request.micro_batch <= request.global_batch,
      "[make_plan] expected a micro-batch of at most the global batch, ",
      request.global_batch, ", got ", request.micro_batch);
  TORCH_CHECK(request.memory >= 0,
              "[make_plan] expected a budget of 0 or more, got ",
              request.memory);
  TORCH_CHECK(request.margin >= 0 && request.margin < 1,
              "[make_plan] expected a margin in [0, 1), got ", request.margin);
  TORCH_CHECK(!request.precisions.empty(),
              "[make_plan] expected a precision to choose from, got none");
  return Planner(request, costs).run();
}

}  // namespace reprise
