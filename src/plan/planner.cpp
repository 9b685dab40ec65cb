#include "plan/candidate.h"
#include "plan/evaluator_cache.h"
#include "plan/explanation.h"
#include "plan/plan_budget.h"
#include "plan/size_search.h"

#include <reprise/plan/planner.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

namespace reprise {
namespace {

using detail::Candidate;
using detail::CandidateKey;
using detail::Evaluator;
using detail::EvaluatorCache;
using detail::key_of;
using detail::kNoLimit;
using detail::SizeSearch;

// Maximum number of additional measurements of sizes that were chosen by
// interpolation.
constexpr int kMaxMeasurements = 5;
// Only the sizes with the shortest predicted times are timed: at most this
// many.
constexpr size_t kMaxTriedSizes = 4;
// Maximum number of trials of one size in one mode, if one of them fits and if none does.
constexpr int kEnoughTries = 3;
constexpr int kMaxTries = 8;
// Before the result is returned, its plan is timed alternately with at most
// kMaxRivals other plans that took at most kRivalRatio times as long, at most
// kMaxComparisons times.
constexpr size_t kMaxRivals = 2;
constexpr double kRivalRatio = 1.25;
constexpr int kMaxComparisons = 2;
// Plans that are predicted to take so many times as long as PlanRequest::rival_ms are not
// tried. Predictions may be too long.
constexpr double kBeatenRatio = 1.25;
// Beside plans that were timed, predictions count so many times as long: a size that was not
// measured yet, or a plan that was not tried, must promise more than noise.
constexpr double kUnmeasuredRatio = 1.03;
constexpr double kUntriedRatio = 1.005;

class Planner {
 public:
  Planner(const PlanRequest& request, CostSource& costs)
      : request_(request),
        costs_(costs),
        plan_budget_(request, costs),
        budget_(plan_budget_.bytes()),
        sizes_(request, costs, budget_),
        evaluators_(request, costs, budget_) {}

  PlanResult run() {
    for (const Precision precision : request_.precisions) {
      sizes_.measure_initial(precision, [this](Precision other) {
        update_candidates();
        return has_plan(other);
      });
    }
    update_candidates();
    for (int measurements = 0;;) {
      const Candidate& chosen = best_or_smallest();
      if (chosen.plan && sizes_.refine(chosen.micro_batch())) {
      } else if (!evaluators_.measured(chosen.key) &&
                 measurements < kMaxMeasurements) {
        if (sizes_.measure(chosen.precision(), chosen.micro_batch())) {
          ++measurements;
        }
      } else if (is_beaten(chosen)) {
        break;
      } else if (chosen.to_be_tried) {
        try_plan(*chosen.plan);
      } else if (const Candidate* other = untried_graph(chosen)) {
        try_plan(*other->plan);
      } else if (!compare_rivals(chosen)) {
        break;
      }
      update_candidates();
    }
    return make_result();
  }

 private:
  bool has_plan(Precision precision) const {
    return std::any_of(candidates_.begin(), candidates_.end(),
                       [&](const Candidate& candidate) {
                         return candidate.plan &&
                                candidate.precision() == precision;
                       });
  }

  void update_candidates() {
    candidates_.clear();
    for (const Precision precision : request_.precisions) {
      const CostProfile& profile = costs_.profile(precision);
      if (profile.sizes.empty()) continue;
      for (const int64_t size : sizes_.sizes()) {
        if (!sizes_.is_candidate(precision, size)) continue;
        for (const UpdateMode update : updates_of(profile, size)) {
          const bool captured =
              update == UpdateMode::kAfter || profile.captures_update;
          if (profile.graph != GraphMode::kOff && captured)
            candidates_.push_back({{precision, size, true, update}});
          if (profile.graph != GraphMode::kOn)
            candidates_.push_back({{precision, size, false, update}});
        }
      }
    }
    for (Candidate& candidate : candidates_) {
      for (Plan& plan : tried_plans(candidate.key)) {
        if (plan.peak_bytes > budget_) continue;
        if (!candidate.tried || plan.step_ms < candidate.tried->step_ms) {
          candidate.tried.emplace(std::move(plan));
        }
      }
    }
    predict_fastest();
    choose_plans();
  }

  /// Returns when parameters may be updated at this size.
  std::vector<UpdateMode> updates_of(const CostProfile& profile,
                                     int64_t size) const {
    std::vector<UpdateMode> updates;
    if (profile.update != UpdateMode::kBackward) {
      updates.push_back(UpdateMode::kAfter);
    }
    if (profile.update != UpdateMode::kAfter &&
        (size >= request_.global_batch || profile.updates_in_last())) {
      updates.push_back(UpdateMode::kBackward);
    }
    return updates;
  }

  /// Returns all plans of this candidate that were ever tried, for any budget,
  /// so that a result for a larger budget is never slower than one for a
  /// smaller budget.
  std::vector<Plan> tried_plans(const CandidateKey& key) {
    std::vector<Plan> plans = evaluators_.tried(key);
    if (request_.strategy.empty()) return plans;
    const Schedule schedule =
        evaluators_.evaluator(key).of_strategy(request_.strategy).schedule;
    std::erase_if(plans, [text = schedule.to_text()](const Plan& plan) {
      return plan.schedule.to_text() != text;
    });
    for (Plan& plan : plans) plan.schedule = schedule;  // with its name
    return plans;
  }

  /// Predicts the candidates that may be tried, in the order of their lower
  /// bounds, until enough predictions are faster than the remaining bounds.
  void predict_fastest() {
    std::vector<std::pair<double, Candidate*>> order;
    for (Candidate& candidate : candidates_) {
      order.emplace_back(evaluators_.evaluator(candidate.key).min_step_ms(),
                         &candidate);
    }
    std::stable_sort(
        order.begin(), order.end(),
        [](const auto& a, const auto& b) { return a.first < b.first; });
    for (const auto& [min_step_ms, candidate] : order) {
      std::set<std::pair<Precision, int64_t>> faster;
      for (const Candidate& other : candidates_) {
        if (other.predicted && other.predicted->step_ms <= min_step_ms) {
          faster.emplace(other.precision(), other.micro_batch());
        }
      }
      if (faster.size() >= kMaxTriedSizes) return;
      predict(*candidate);
    }
  }

  void predict(Candidate& candidate) {
    if (std::exchange(candidate.was_predicted, true)) return;
    candidate.predicted = evaluators_.fastest(candidate.key);
    // Omit this candidate if the same schedule also fits as a CUDA graph, or with the update
    // after the backward, which needs fewer backward calls and can be repeated if memory
    // runs out, and is hardly slower so.
    constexpr double kHardly = 1.005;
    for (Candidate& other : candidates_) {
      if (!candidate.predicted) return;
      if (!other.same_size(candidate) || !is_preferred(other, candidate)) {
        continue;
      }
      predict(other);
      if (other.predicted &&
          other.predicted->step_ms <= kHardly * candidate.predicted->step_ms &&
          other.predicted->schedule.to_text() ==
              candidate.predicted->schedule.to_text()) {
        candidate.predicted.reset();
      }
    }
  }

  /// Whether `other` differs from `candidate` in one respect and is better for equal
  /// schedules.
  static bool is_preferred(const Candidate& other, const Candidate& candidate) {
    const bool as_graph = other.graph() && !candidate.graph();
    const bool after = other.update() == UpdateMode::kAfter &&
                       candidate.update() == UpdateMode::kBackward;
    return (as_graph && other.update() == candidate.update()) ||
           (after && other.graph() == candidate.graph());
  }

  /// Chooses the plan of each candidate. Only the few sizes with the shortest
  /// predicted times are tried. They are the same every time, so that a second
  /// request tries nothing more.
  void choose_plans() {
    std::vector<Candidate*> order;
    for (Candidate& candidate : candidates_) {
      if (candidate.predicted && candidate.tried &&
          candidate.predicted->schedule.to_text() ==
              candidate.tried->schedule.to_text()) {
        candidate.tried->schedule =
            candidate.predicted->schedule;  // keeps its name
      }
      candidate.plan = candidate.tried;
      if (candidate.predicted) order.push_back(&candidate);
    }
    std::stable_sort(order.begin(), order.end(), [](const auto* a, auto* b) {
      return a->predicted->step_ms < b->predicted->step_ms;
    });
    std::set<std::pair<Precision, int64_t>> sizes;
    for (Candidate* pointer : order) {
      Candidate& candidate = *pointer;
      sizes.emplace(candidate.precision(), candidate.micro_batch());
      const Plan& plan = *candidate.predicted;
      if (was_tried(plan)) continue;
      const bool cannot = cannot_be_tried(plan);
      if (!cannot && sizes.size() > kMaxTriedSizes) continue;
      if (candidate.plan && candidate.plan->step_ms <= plan.step_ms) continue;
      // Trials correct predicted peaks, which may go on for a while.
      const int tries = tries_[candidate.key];
      const int enough = candidate.plan ? kEnoughTries : kMaxTries;
      if (!cannot && tries >= enough) continue;
      candidate.plan = plan;
      candidate.to_be_tried = !cannot;
    }
  }

  const TriedSchedule* find_tried(const Plan& plan) const {
    const CostProfile& profile = costs_.profile(plan.precision);
    return profile.find_tried(
        plan.micro_batch, plan.schedule.to_text(), plan.graph,
        detail::timed_update(profile, plan.update, plan.micro_batch,
                             request_.global_batch));
  }
  bool was_tried(const Plan& plan) const { return find_tried(plan) != nullptr; }
  bool cannot_be_tried(const Plan& plan) const {
    return cannot_be_tried_.count({key_of(plan), plan.schedule.to_text()}) > 0;
  }

  /// Whether another plan is faster in all likelihood.
  bool is_beaten(const Candidate& chosen) const {
    return request_.rival_ms > 0 && chosen.plan &&
           chosen.plan->step_ms > kBeatenRatio * request_.rival_ms;
  }

  void try_plan(const Plan& plan) {
    ++tries_[key_of(plan)];
    if (!costs_.try_plan(plan)) {
      cannot_be_tried_.insert({key_of(plan), plan.schedule.to_text()});
    }
  }

  /// Times the chosen plan alternately with those that may be faster, because
  /// times that were measured at different moments are not comparable. Returns
  /// false if there is nothing to compare.
  bool compare_rivals(const Candidate& chosen) {
    if (comparisons_ >= kMaxComparisons || !chosen.plan ||
        !was_tried(*chosen.plan)) {
      return false;
    }
    std::vector<Plan> rivals = {*chosen.plan};
    const auto is_new = [&](const Plan& plan) {
      return std::none_of(rivals.begin(), rivals.end(), [&](const Plan& other) {
        return key_of(plan) == key_of(other) &&
               plan.schedule.to_text() == other.schedule.to_text();
      });
    };
    // The plan with the shortest predicted time should be the fastest of its
    // size, whatever was measured.
    const auto& predicted = evaluators_.fastest(chosen.key);
    if (predicted && is_new(*predicted) && !cannot_be_tried(*predicted)) {
      if (!was_tried(*predicted)) {
        try_plan(*predicted);
        return true;
      }
      rivals.push_back(*predicted);
    }
    std::vector<Plan> others;
    for (const Candidate& candidate : candidates_) {
      for (Plan& plan : tried_plans(candidate.key)) {
        if (plan.peak_bytes > budget_ || !is_new(plan) ||
            plan.step_ms > kRivalRatio * chosen.plan->step_ms) {
          continue;
        }
        others.push_back(std::move(plan));
      }
    }
    std::stable_sort(
        others.begin(), others.end(),
        [](const Plan& a, const Plan& b) { return a.step_ms < b.step_ms; });
    for (Plan& plan : others) {
      if (rivals.size() <= kMaxRivals) rivals.push_back(std::move(plan));
    }
    const int64_t comparison = find_tried(rivals.front())->comparison;
    const bool compared =
        comparison > 0 &&
        std::all_of(rivals.begin(), rivals.end(), [&](const auto& rival) {
          return find_tried(rival)->comparison == comparison;
        });
    if (rivals.size() < 2 || compared) return false;
    ++comparisons_;
    return costs_.compare(rivals);
  }

  const Candidate* best() const {
    const bool measures =
        std::any_of(candidates_.begin(), candidates_.end(),
                    [](const Candidate& one) { return one.tried.has_value(); });
    const Candidate* best = nullptr;
    double least_ms = 0;
    for (const Candidate& candidate : candidates_) {
      if (!candidate.plan) continue;
      const double ms =
          candidate.plan->step_ms * (measures ? caution(candidate) : 1);
      if (best != nullptr && ms >= least_ms) continue;
      best = &candidate;
      least_ms = ms;
    }
    return best;
  }

  double caution(const Candidate& candidate) const {
    if (!evaluators_.measured(candidate.key)) return kUnmeasuredRatio;
    return candidate.to_be_tried ? kUntriedRatio : 1;
  }

  /// Returns the candidate of the same size with a CUDA graph, if it is still
  /// to be tried. The stages' times do not tell how much time a CUDA graph
  /// saves.
  const Candidate* untried_graph(const Candidate& chosen) const {
    for (const Candidate& candidate : candidates_) {
      if (candidate.graph() && !chosen.graph() && candidate.to_be_tried &&
          candidate.update() == chosen.update() &&
          candidate.same_size(chosen)) {
        return &candidate;
      }
    }
    return nullptr;
  }

  /// Returns the candidate with the lowest peak, of all or only of those that
  /// were measured. Lower bounds exclude most of them without solving.
  const Candidate* smallest(bool measured_only) {
    std::vector<std::pair<int64_t, const Candidate*>> order;
    for (const Candidate& candidate : candidates_) {
      if (measured_only && !evaluators_.measured(candidate.key)) continue;
      order.emplace_back(evaluators_.evaluator(candidate.key).min_peak_bytes(),
                         &candidate);
    }
    std::stable_sort(
        order.begin(), order.end(),
        [](const auto& a, const auto& b) { return a.first < b.first; });
    const Candidate* smallest = nullptr;
    int64_t smallest_bytes = kNoLimit;
    for (const auto& [bound, candidate] : order) {
      if (bound >= smallest_bytes) break;
      const int64_t bytes = evaluators_.smallest(candidate->key).peak_bytes;
      if (bytes >= smallest_bytes) continue;
      smallest = candidate;
      smallest_bytes = bytes;
    }
    return smallest;
  }

  const Candidate& best_or_smallest() {
    const Candidate* chosen = best();
    if (chosen == nullptr) chosen = smallest(/*measured_only=*/false);
    TORCH_CHECK(chosen != nullptr, "[make_plan] not even a micro-batch of ",
                sizes_.sizes().front(), " fits on the device");
    return *chosen;
  }

  PlanResult make_result() {
    const Candidate& chosen = best_or_smallest();
    const bool feasible = chosen.plan.has_value();
    // A size that is reported to fit must have been measured.
    const Candidate* least = smallest(/*measured_only=*/feasible);
    PlanResult result{
        request_,
        feasible,
        feasible ? *chosen.plan
                 : evaluators_.calibrated(evaluators_.smallest(chosen.key)),
        alternatives(chosen),
        {},
        {},
        {},
        costs_.profile(chosen.precision()).stages,
        least == nullptr
            ? 0
            : plan_budget_.with_margin(
                  evaluators_.calibrated(evaluators_.smallest(least->key))
                      .peak_bytes)};
    if (!request_.explain) return result;
    std::vector<CandidateKey> keys;
    for (const Candidate& candidate : candidates_)
      keys.push_back(candidate.key);
    result.plan.peak.is_floor = evaluators_.is_floor(result.plan);
    result.plan.bound = evaluators_.bound_of(result.plan);
    result.frontier = detail::frontier_of(result, keys, budget_, evaluators_);
    result.references = detail::references_of(result, evaluators_);
    result.peak_reductions = detail::peak_reductions_of(
        result, keys, costs_.profile(chosen.precision()), evaluators_);
    return result;
  }

  /// Returns plans of other sizes that were measured. Interpolation may report
  /// that a size fits that does not.
  std::vector<Plan> alternatives(const Candidate& chosen) {
    std::vector<Plan> list;
    for (Candidate& candidate : candidates_) {
      if (&candidate == &chosen || !evaluators_.measured(candidate.key))
        continue;
      predict(candidate);
      if (candidate.plan) {
        list.push_back(*candidate.plan);
      } else if (candidate.predicted) {
        list.push_back(evaluators_.calibrated(*candidate.predicted));
      }
    }
    std::sort(list.begin(), list.end(), [](const Plan& a, const Plan& b) {
      return a.step_ms < b.step_ms;
    });
    // Keep the faster one of the plans with and without a CUDA graph.
    std::set<std::pair<Precision, int64_t>> seen;
    if (chosen.plan) seen.emplace(chosen.precision(), chosen.micro_batch());
    std::erase_if(list, [&](const Plan& plan) {
      return !seen.emplace(plan.precision, plan.micro_batch).second;
    });
    return list;
  }

  const PlanRequest& request_;
  CostSource& costs_;
  detail::PlanBudget plan_budget_;
  int64_t budget_;  // maximum of a plan's peak
  SizeSearch sizes_;
  EvaluatorCache evaluators_;
  std::vector<Candidate> candidates_;
  std::set<std::pair<CandidateKey, std::string>> cannot_be_tried_;
  std::map<CandidateKey, int> tries_;
  int comparisons_ = 0;
};

}  // namespace

PlanResult make_plan(const PlanRequest& request, CostSource& costs) {
  TORCH_CHECK(request.global_batch > 0,
              "[make_plan] expected a positive global batch, got ",
              request.global_batch);
  TORCH_CHECK(
      request.micro_batch >= 0 && request.micro_batch <= request.global_batch,
      "[make_plan] expected a micro-batch between 0 and the global batch, ",
      request.global_batch, ", got ", request.micro_batch);
  TORCH_CHECK(request.memory >= 0,
              "[make_plan] expected a non-negative budget, got ",
              request.memory);
  TORCH_CHECK(request.margin >= 0 && request.margin < 1,
              "[make_plan] expected a margin in [0, 1), got ", request.margin);
  TORCH_CHECK(!request.precisions.empty(),
              "[make_plan] expected at least one precision, got none");
  return Planner(request, costs).run();
}

}  // namespace reprise
