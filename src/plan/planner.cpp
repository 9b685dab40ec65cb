#include "candidate_sizes.h"
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

using plan_detail::candidate_sizes;
using plan_detail::Evaluator;

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max() / 4;
// How often the choice may lead to a measurement that changes the choice.
constexpr int kMostRounds = 6;
// Of the sizes, those predicted fastest that may be tried.
constexpr size_t kMostTried = 4;
constexpr int kFrontierPoints = 24;  // of each micro-batch size

/// A precision and a micro-batch size, with a CUDA graph or without.
using Key = std::tuple<std::string, int64_t, bool>;

/// What was found for one of them.
struct Choice {
  std::string precision;
  int64_t micro_batch = 0;
  bool graph = false;
  /// The fastest that fits, by the sum of its stages' times.
  std::optional<Plan> predicted;
  Plan smallest;  // whatever the budget
  /// The fastest that fits of those tried.
  std::optional<Plan> tried;
  /// The fastest that an answer may rest on, or could once it was tried.
  std::optional<Plan> plan{};
  bool to_be_tried = false;

  Key key() const { return {precision, micro_batch, graph}; }
};

Key key_of(const Plan& plan) {
  return {plan.precision, plan.micro_batch, plan.graph};
}

FrontierPoint point_of(const Plan& plan) {
  return {plan.peak_bytes, plan.step_ms, plan.micro_batch, {}};
}

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
    for (int round = 0;;) {
      const Choice& chosen = best_or_least();
      const bool known =
          costs_.profile(chosen.precision).measured(chosen.micro_batch);
      if (!known && round < kMostRounds) {
        // A size without room rules itself out; a measured one is a round.
        if (measure(chosen.precision, chosen.micro_batch)) ++round;
      } else if (chosen.to_be_tried) {
        try_out(chosen);
      } else if (const Choice* other = with_graph(chosen)) {
        try_out(*other);
      } else {
        break;
      }
      consider_all();
    }
    return answer();
  }

 private:
  using Times = std::map<std::string, double>;  // by the schedule's text

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
      for (const TriedSchedule& one : profile.tried) {
        tried_[{precision, one.micro_batch, one.graph}][one.schedule] = one.ms;
      }
      for (const int64_t size : sizes_) {
        if (!can_try(precision, size)) continue;
        if (profile.graph != "off") consider({precision, size, true});
        if (profile.graph != "on") consider({precision, size, false});
      }
    }
    settle();
  }

  void consider(const Key& key) {
    const Evaluator& evaluator = evaluator_for(key);
    const auto& [precision, size, graph] = key;
    Choice choice{precision,
                  size,
                  graph,
                  evaluator.fastest(budget_),
                  evaluator.smallest(),
                  std::nullopt};
    // Where a graph fits as well, nothing speaks for going without.
    if (!graph && choice.predicted && !choices_.empty()) {
      const Choice& with = choices_.back();
      if (with.graph && with.predicted &&
          with.predicted->schedule.to_text() ==
              choice.predicted->schedule.to_text()) {
        choice.predicted.reset();
      }
    }
    for (Plan& plan : tried_plans(choice, evaluator)) {
      if (plan.peak_bytes > budget_) continue;
      if (!choice.tried || plan.step_ms < choice.tried->step_ms) {
        choice.tried.emplace(std::move(plan));
      }
    }
    choices_.push_back(std::move(choice));
  }

  /// All that were tried at this size, at whatever budget: an answer at more
  /// memory is then never slower than one at less.
  std::vector<Plan> tried_plans(const Choice& choice,
                                const Evaluator& evaluator) const {
    std::vector<Plan> plans;
    const auto& chosen = choice.predicted;
    const std::string text = chosen ? chosen->schedule.to_text() : "";
    for (const auto& [schedule, ms] : times_of(choice.key())) {
      if (schedule == text) {
        plans.push_back(evaluator.with_time(*chosen, ms));
      } else if (request_.strategy.empty()) {
        const Plan plan = evaluator.plan_of(Schedule::parse(
            "optimal", choice.smallest.schedule.stages(), schedule));
        plans.push_back(evaluator.with_time(plan, ms));
      }
    }
    return plans;
  }

  /// Which plans an answer may rest on. Only the few predicted fastest are tried:
  /// the same few each time, so that asking again tries nothing more.
  void settle() {
    std::vector<Choice*> order;
    for (Choice& choice : choices_) {
      choice.plan = choice.tried;
      if (choice.predicted) order.push_back(&choice);
    }
    std::stable_sort(order.begin(), order.end(), [](const auto* a, auto* b) {
      return a->predicted->step_ms < b->predicted->step_ms;
    });
    std::set<std::pair<std::string, int64_t>> sizes;
    for (Choice* one : order) {
      Choice& choice = *one;
      sizes.emplace(choice.precision, choice.micro_batch);
      const Plan& plan = *choice.predicted;
      const Key key = choice.key();
      const std::string text = plan.schedule.to_text();
      if (times_of(key).count(text) > 0) continue;
      const bool cannot = cannot_be_tried_.count({key, text}) > 0;
      if (!cannot && sizes.size() > kMostTried) continue;
      if (choice.plan && choice.plan->step_ms <= plan.step_ms) continue;
      choice.plan = plan;
      choice.to_be_tried = !cannot;
    }
  }

  const Times& times_of(const Key& key) const {
    static const Times none;
    const auto found = tried_.find(key);
    return found == tried_.end() ? none : found->second;
  }

  void try_out(const Choice& choice) {
    const std::string text = choice.plan->schedule.to_text();
    if (const auto ms = costs_.try_plan(*choice.plan)) {
      tried_[choice.key()][text] = *ms;
    } else {
      cannot_be_tried_.insert({choice.key(), text});
    }
  }

  /// What was not tried, as far off as what was tried at its size and needs
  /// about as much memory.
  Plan likely(const Plan& plan) {
    const Times& times = times_of(key_of(plan));
    if (times.empty()) return plan;
    const Evaluator& evaluator = evaluator_for(key_of(plan));
    const auto known = times.find(plan.schedule.to_text());
    if (known != times.end()) return evaluator.with_time(plan, known->second);
    int64_t nearest = std::numeric_limits<int64_t>::max();
    double ratio = 1;
    for (const auto& [schedule, ms] : times) {
      const Plan other = evaluator.plan_of(
          Schedule::parse("tried", plan.schedule.stages(), schedule));
      const int64_t distance = std::abs(other.peak_bytes - plan.peak_bytes);
      if (distance >= nearest) continue;
      nearest = distance;
      ratio = ms / other.micro_ms;
    }
    return evaluator.with_time(plan, plan.micro_ms * ratio);
  }

  /// Solving takes a while, so one for each size until more is measured.
  const Evaluator& evaluator_for(const Key& key) {
    const auto& [precision, size, graph] = key;
    const CostProfile& profile = costs_.profile(precision);
    const auto found = evaluators_.find(key);
    const size_t known = profile.sizes.size();
    if (found != evaluators_.end() && found->second.first == known) {
      return *found->second.second;
    }
    auto evaluator = std::make_unique<Evaluator>(
        profile, size, request_.global_batch, request_.strategy, graph);
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

  /// The same size with a graph, where that is still to be tried: stages' times say
  /// nothing of what a graph saves.
  const Choice* with_graph(const Choice& chosen) const {
    for (const Choice& choice : choices_) {
      if (choice.graph && !chosen.graph && choice.to_be_tried &&
          choice.precision == chosen.precision &&
          choice.micro_batch == chosen.micro_batch) {
        return &choice;
      }
    }
    return nullptr;
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

  const Choice& best_or_least() const {
    const Choice* chosen = best();
    if (chosen == nullptr) chosen = least();
    TORCH_CHECK(chosen != nullptr, "[make_plan] not even a micro-batch of ",
                sizes_.front(), " fits on the device");
    return *chosen;
  }

  PlanResult answer() {
    const Choice& chosen = best_or_least();
    const bool feasible = chosen.plan.has_value();
    PlanResult result{request_,
                      feasible,
                      feasible ? *chosen.plan : likely(chosen.smallest),
                      {},
                      {},
                      {},
                      {},
                      costs_.profile(chosen.precision).stages,
                      with_margin(least()->smallest.peak_bytes)};
    for (const Choice& choice : choices_) {
      if (&choice == &chosen) continue;
      if (choice.plan) {
        result.alternatives.push_back(*choice.plan);
      } else if (choice.predicted) {
        result.alternatives.push_back(likely(*choice.predicted));
      }
    }
    std::sort(
        result.alternatives.begin(), result.alternatives.end(),
        [](const Plan& a, const Plan& b) { return a.step_ms < b.step_ms; });
    // With a graph or without, whichever is faster.
    std::set<std::pair<std::string, int64_t>> seen;
    if (feasible) seen.emplace(chosen.precision, chosen.micro_batch);
    std::erase_if(result.alternatives, [&](const Plan& plan) {
      return !seen.emplace(plan.precision, plan.micro_batch).second;
    });
    if (!request_.explain) return result;
    result.frontier = frontier(result);
    result.references = references(result.plan);
    result.measures = measures(chosen, result.plan);
    return result;
  }

  /// The budget that such a peak needs.
  int64_t with_margin(int64_t peak_bytes) const {
    return static_cast<int64_t>(std::ceil(
        (static_cast<double>(peak_bytes) + 1) / (1 - request_.margin)));
  }

  std::vector<FrontierPoint> frontier(const PlanResult& result) {
    std::vector<FrontierPoint> all;
    const auto add = [&](const Plan& plan) {
      // No prediction within the budget stands against the plan, which was
      // tried.
      const bool refuted = !tried_.empty() && result.feasible &&
                           plan.peak_bytes <= budget_ &&
                           plan.step_ms <= result.plan.step_ms;
      if (!refuted) all.push_back(point_of(plan));
    };
    for (const Choice& choice : choices_) {
      const Evaluator& evaluator = evaluator_for(choice.key());
      for (const Plan& plan : evaluator.frontier(kFrontierPoints)) {
        add(likely(plan));
      }
      for (const Plan& plan : tried_plans(choice, evaluator)) add(plan);
    }
    if (!tried_.empty()) all.push_back(point_of(result.plan));
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
      const Evaluator& evaluator =
          evaluator_for({plan.precision, size, plan.graph});
      for (const char* name : {"none", "all", "sqrt"}) {
        const Plan there = likely(evaluator.of_strategy(name));
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
    add("recompute more, at the same micro-batch", likely(chosen.smallest));
    const Choice* smaller = nullptr;
    for (const Choice& choice : choices_) {
      if (choice.precision == chosen.precision &&
          choice.graph == chosen.graph &&
          choice.micro_batch < chosen.micro_batch) {
        smaller = &choice;  // the sizes rise
      }
    }
    if (smaller != nullptr) {
      add(fmt::format("micro-batch {} instead of {}", smaller->micro_batch,
                      chosen.micro_batch),
          likely(smaller->smallest));
    }
    if (chosen.precision == "fp32" && (!chosen.plan || plan.peak.is_floor) &&
        can_measure("bf16", chosen.micro_batch)) {
      add("bf16 instead of fp32",
          evaluator_for({"bf16", chosen.micro_batch, chosen.graph}).smallest());
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
  std::map<Key, Times> tried_;
  std::set<std::pair<Key, std::string>> cannot_be_tried_;
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
