#include "plan/candidate_sizes.h"
#include "plan/evaluations.h"
#include "plan/explanation.h"

#include <reprise/plan/planner.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <utility>

namespace reprise {
namespace {

using detail::candidate_sizes;
using detail::Evaluations;
using detail::Evaluator;
using detail::Key;
using detail::key_of;

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max() / 4;
// How often the choice may lead to a measurement that changes the choice.
constexpr int kMostRounds = 6;
// Of the sizes, those predicted fastest that may be tried.
constexpr size_t kMostTried = 4;
// Plans timed in turn before an answer rests on one of them: this many besides it,
// if they took at most so many times as long.
constexpr size_t kMostRivals = 2;
constexpr double kRivalRatio = 1.25;
constexpr int kMostComparisons = 2;
// A precision that takes so many times as long as the first one at some size is not
// measured at larger ones; nor one that takes longer at two sizes, at the larger of them
// by more.
constexpr double kHopelessRatio = 4;
constexpr double kSlowRatio = 1.5;

/// What was found for one size.
struct Choice {
  Key key;
  /// The fastest that fits, by the sum of its stages' times; not looked for where
  /// enough others are faster for certain.
  std::optional<Plan> predicted{};
  bool was_predicted = false;
  /// The fastest that fits of those tried.
  std::optional<Plan> tried{};
  /// The fastest that an answer may rest on, or could once it was tried.
  std::optional<Plan> plan{};
  bool to_be_tried = false;

  const std::string& precision() const { return std::get<0>(key); }
  int64_t micro_batch() const { return std::get<1>(key); }
  bool graph() const { return std::get<2>(key); }
};

class Planner {
 public:
  Planner(const PlanRequest& request, CostSource& costs)
      : request_(request),
        costs_(costs),
        all_sizes_(candidate_sizes(request)),
        sizes_(detail::thinned(all_sizes_)),
        budget_(request.memory > 0
                    ? static_cast<int64_t>(static_cast<double>(request.memory) *
                                           (1 - request.margin))
                    : kNoLimit),
        evaluations_(request, costs, budget_) {}

  PlanResult run() {
    for (const auto& precision : request_.precisions) begin(precision);
    consider_all();
    for (int round = 0;;) {
      const Choice& chosen = best_or_least();
      if (chosen.plan && refine(chosen.micro_batch())) {
      } else if (!evaluations_.measured(chosen.key) && round < kMostRounds) {
        // A size without room rules itself out; a measured one is a round.
        if (measure(chosen.precision(), chosen.micro_batch())) ++round;
      } else if (chosen.to_be_tried) {
        try_out(*chosen.plan);
      } else if (const Choice* other = with_graph(chosen)) {
        try_out(*other->plan);
      } else if (!compare_rivals(chosen)) {
        break;
      }
      consider_all();
    }
    return answer();
  }

 private:
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
        if (is_hopeless(precision, size)) {
          leave_out_from(precision, size);
          break;
        }
      } else if (cannot_run_.count(size) == 0) {
        break;
      }
    }
  }

  /// If the device has no room for a size, it has none for larger ones. A size
  /// that cannot be run at all is passed over, unless it is the last.
  bool measure(const std::string& precision, int64_t size) {
    try {
      if (costs_.measure(precision, size)) return true;
    } catch (const c10::Error&) {
      if (size == sizes_.back()) throw;
      cannot_run_.insert(size);
      return false;
    }
    leave_out_from(precision, size);
    return false;
  }

  void leave_out_from(const std::string& precision, int64_t size) {
    const auto known = left_out_from_.emplace(precision, size).first;
    known->second = std::min(known->second, size);
  }

  /// Many processors have no products of half precision and are slower with them by an
  /// order of magnitude: measuring every size would take longer than the training saves.
  /// Never where the first precision does not fit.
  bool is_hopeless(const std::string& precision, int64_t size) {
    const std::string& first = request_.precisions.front();
    if (precision == first || !costs_.profile(first).measured(size)) {
      return false;
    }
    const double ratio = ratio_of(precision, first, size);
    bool hopeless = ratio > kHopelessRatio;
    for (const SizeCosts& other : costs_.profile(precision).sizes) {
      const int64_t smaller = other.micro_batch;
      if (smaller >= size || !costs_.profile(first).measured(smaller)) continue;
      const double before = ratio_of(precision, first, smaller);
      hopeless |= before > kSlowRatio && ratio > before;
    }
    if (!hopeless) return false;
    consider_all();
    return std::any_of(choices_.begin(), choices_.end(), [&](const auto& c) {
      return c.plan && c.precision() == first;
    });
  }

  /// Time of the stages in one precision over that in another.
  double ratio_of(const std::string& precision, const std::string& other,
                  int64_t size) const {
    const auto ms = [&](const std::string& name) {
      double sum = 0;
      for (const auto& stage : costs_.profile(name).at(size).figures.stages) {
        sum += stage.forward_ms + stage.backward_ms;
      }
      return sum;
    };
    return ms(precision) / ms(other);
  }

  bool can_try(const std::string& precision, int64_t size) const {
    const int64_t rest = request_.global_batch % size;
    if (cannot_run_.count(size) > 0 || cannot_run_.count(rest) > 0) {
      return false;
    }
    const auto known = left_out_from_.find(precision);
    return known == left_out_from_.end() || size < known->second;
  }

  /// By what is known so far: a stage alone, with nothing else kept.
  bool may_fit(const CostProfile& profile, int64_t size) const {
    const SizeCosts costs = profile.at(size);
    int64_t most = 0;
    for (const auto& stage : costs.figures.stages) {
      const auto alone = [](const KeptRunCosts& kept) {
        return kept.saved_bytes + kept.backward_extra_bytes;
      };
      int64_t least = alone(stage);
      for (const auto& variant : stage.variants) {
        least = std::min(least, alone(variant));
      }
      most = std::max(most, least);
    }
    return profile.fixed.total() + costs.data_bytes + costs.workspace_bytes +
               most <=
           budget_;
  }

  /// Of many sizes only some are looked at first: adds all those between the
  /// neighbours of the best one. False if there are none.
  bool refine(int64_t size) {
    const auto here = std::lower_bound(sizes_.begin(), sizes_.end(), size);
    const int64_t low = here == sizes_.begin() ? size : *(here - 1);
    const int64_t high = here + 1 == sizes_.end() ? size : *(here + 1);
    std::set<int64_t> with(sizes_.begin(), sizes_.end());
    for (const int64_t other : all_sizes_) {
      if (other > low && other < high) with.insert(other);
    }
    if (with.size() == sizes_.size()) return false;
    sizes_.assign(with.begin(), with.end());
    return true;
  }

  void consider_all() {
    choices_.clear();
    for (const auto& precision : request_.precisions) {
      const CostProfile& profile = costs_.profile(precision);
      if (profile.sizes.empty()) continue;
      for (const int64_t size : sizes_) {
        if (!can_try(precision, size)) continue;
        if (profile.graph != "off")
          choices_.push_back({{precision, size, true}});
        if (profile.graph != "on")
          choices_.push_back({{precision, size, false}});
      }
    }
    for (Choice& choice : choices_) {
      for (Plan& plan : tried_plans(choice.key)) {
        if (plan.peak_bytes > budget_) continue;
        if (!choice.tried || plan.step_ms < choice.tried->step_ms) {
          choice.tried.emplace(std::move(plan));
        }
      }
    }
    predict_fastest();
    settle();
  }

  /// All that were tried at this size, at whatever budget: an answer at more
  /// memory is then never slower than one at less.
  std::vector<Plan> tried_plans(const Key& key) {
    std::vector<Plan> plans;
    const Evaluator& evaluator = evaluations_.of(key);
    for (const auto& [schedule, ms] : evaluations_.times_of(key)) {
      if (!request_.strategy.empty()) {
        const Plan plan = evaluator.of_strategy(request_.strategy);
        if (plan.schedule.to_text() == schedule) {
          plans.push_back(evaluator.with_time(plan, ms));
        }
        continue;
      }
      plans.push_back(
          evaluator.with_time(evaluations_.plan_of(key, schedule), ms));
    }
    return plans;
  }

  /// The predictions of the sizes that may be tried, and of those whose bounds leave
  /// open whether they are among these.
  void predict_fastest() {
    std::vector<std::pair<double, Choice*>> order;
    for (Choice& choice : choices_) {
      order.emplace_back(evaluations_.of(choice.key).least_ms(), &choice);
    }
    std::stable_sort(
        order.begin(), order.end(),
        [](const auto& a, const auto& b) { return a.first < b.first; });
    for (const auto& [least_ms, choice] : order) {
      std::set<std::pair<std::string, int64_t>> faster;
      for (const Choice& other : choices_) {
        if (other.predicted && other.predicted->step_ms <= least_ms) {
          faster.emplace(other.precision(), other.micro_batch());
        }
      }
      if (faster.size() >= kMostTried) return;
      predict(*choice);
    }
  }

  void predict(Choice& choice) {
    if (std::exchange(choice.was_predicted, true)) return;
    choice.predicted = evaluations_.fastest(choice.key);
    if (choice.graph() || !choice.predicted) return;
    // If a graph fits as well, nothing speaks for going without.
    for (Choice& other : choices_) {
      if (!other.graph() || other.precision() != choice.precision() ||
          other.micro_batch() != choice.micro_batch()) {
        continue;
      }
      predict(other);
      if (other.predicted && other.predicted->schedule.to_text() ==
                                 choice.predicted->schedule.to_text()) {
        choice.predicted.reset();
      }
      return;
    }
  }

  /// Which plans an answer may rest on. Only the few predicted fastest are tried:
  /// the same few each time, so that asking again tries nothing more.
  void settle() {
    std::vector<Choice*> order;
    for (Choice& choice : choices_) {
      if (choice.predicted && choice.tried &&
          choice.predicted->schedule.to_text() ==
              choice.tried->schedule.to_text()) {
        choice.tried->schedule = choice.predicted->schedule;  // with its name
      }
      choice.plan = choice.tried;
      if (choice.predicted) order.push_back(&choice);
    }
    std::stable_sort(order.begin(), order.end(), [](const auto* a, auto* b) {
      return a->predicted->step_ms < b->predicted->step_ms;
    });
    std::set<std::pair<std::string, int64_t>> sizes;
    for (Choice* one : order) {
      Choice& choice = *one;
      sizes.emplace(choice.precision(), choice.micro_batch());
      const Plan& plan = *choice.predicted;
      if (was_tried(plan)) continue;
      const bool cannot = cannot_be_tried(plan);
      if (!cannot && sizes.size() > kMostTried) continue;
      if (choice.plan && choice.plan->step_ms <= plan.step_ms) continue;
      choice.plan = plan;
      choice.to_be_tried = !cannot;
    }
  }

  const TriedSchedule* find_tried(const Plan& plan) const {
    return costs_.profile(plan.precision)
        .find_tried(plan.micro_batch, plan.schedule.to_text(), plan.graph);
  }
  bool was_tried(const Plan& plan) const { return find_tried(plan) != nullptr; }
  bool cannot_be_tried(const Plan& plan) const {
    return cannot_be_tried_.count({key_of(plan), plan.schedule.to_text()}) > 0;
  }

  void try_out(const Plan& plan) {
    if (!costs_.try_plan(plan)) {
      cannot_be_tried_.insert({key_of(plan), plan.schedule.to_text()});
    }
  }

  /// Before an answer rests on times that were taken at different moments: has the
  /// plan and those that may be faster timed in turn. False if there is nothing to do.
  bool compare_rivals(const Choice& chosen) {
    if (comparisons_ >= kMostComparisons || !chosen.plan ||
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
    // The one with the least work should be the fastest of its size, whatever was
    // measured.
    const auto& predicted = evaluations_.fastest(chosen.key);
    if (predicted && is_new(*predicted) && !cannot_be_tried(*predicted)) {
      if (!was_tried(*predicted)) {
        try_out(*predicted);
        return true;
      }
      rivals.push_back(*predicted);
    }
    std::vector<Plan> others;
    for (const Choice& choice : choices_) {
      for (Plan& plan : tried_plans(choice.key)) {
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
      if (rivals.size() <= kMostRivals) rivals.push_back(std::move(plan));
    }
    const int64_t row = find_tried(rivals.front())->row;
    const bool compared =
        row > 0 &&
        std::all_of(rivals.begin(), rivals.end(),
                    [&](const auto& r) { return find_tried(r)->row == row; });
    if (rivals.size() < 2 || compared) return false;
    ++comparisons_;
    return costs_.compare(rivals);
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

  /// The same size with a graph, if that is still to be tried: stages' times say
  /// nothing of what a graph saves.
  const Choice* with_graph(const Choice& chosen) const {
    for (const Choice& choice : choices_) {
      if (choice.graph() && !chosen.graph() && choice.to_be_tried &&
          choice.precision() == chosen.precision() &&
          choice.micro_batch() == chosen.micro_batch()) {
        return &choice;
      }
    }
    return nullptr;
  }

  /// The one that needs least memory, of all or of those that were measured. Bounds
  /// rule out most without a solver.
  const Choice* least(bool measured) {
    std::vector<std::pair<int64_t, const Choice*>> order;
    for (const Choice& choice : choices_) {
      if (measured && !evaluations_.measured(choice.key)) continue;
      order.emplace_back(evaluations_.of(choice.key).least_bytes(), &choice);
    }
    std::stable_sort(
        order.begin(), order.end(),
        [](const auto& a, const auto& b) { return a.first < b.first; });
    const Choice* least = nullptr;
    int64_t least_bytes = kNoLimit;
    for (const auto& [bound, choice] : order) {
      if (bound >= least_bytes) break;
      const int64_t bytes = evaluations_.smallest(choice->key).peak_bytes;
      if (bytes >= least_bytes) continue;
      least = choice;
      least_bytes = bytes;
    }
    return least;
  }

  const Choice& best_or_least() {
    const Choice* chosen = best();
    if (chosen == nullptr) chosen = least(/*measured=*/false);
    TORCH_CHECK(chosen != nullptr, "[make_plan] not even a micro-batch of ",
                sizes_.front(), " fits on the device");
    return *chosen;
  }

  PlanResult answer() {
    const Choice& chosen = best_or_least();
    const bool feasible = chosen.plan.has_value();
    // What is said to fit was measured.
    const Choice* smallest = least(/*measured=*/feasible);
    PlanResult result{
        request_,
        feasible,
        feasible ? *chosen.plan
                 : evaluations_.likely(evaluations_.smallest(chosen.key)),
        alternatives(chosen),
        {},
        {},
        {},
        costs_.profile(chosen.precision()).stages,
        smallest == nullptr
            ? 0
            : with_margin(evaluations_.smallest(smallest->key).peak_bytes)};
    if (!request_.explain) return result;
    std::vector<Key> keys;
    for (const Choice& choice : choices_) keys.push_back(choice.key);
    result.plan.peak.is_floor = evaluations_.is_floor(result.plan);
    result.frontier = detail::frontier_of(result, keys, budget_, evaluations_);
    result.references = detail::references_of(result, evaluations_);
    result.measures = detail::measures_of(
        result, keys, costs_.profile(chosen.precision()), evaluations_);
    return result;
  }

  /// Sizes that were measured: between them a line may say that one fits which does
  /// not.
  std::vector<Plan> alternatives(const Choice& chosen) {
    std::vector<Plan> list;
    for (Choice& choice : choices_) {
      if (&choice == &chosen || !evaluations_.measured(choice.key)) continue;
      predict(choice);
      if (choice.plan) {
        list.push_back(*choice.plan);
      } else if (choice.predicted) {
        list.push_back(evaluations_.likely(*choice.predicted));
      }
    }
    std::sort(list.begin(), list.end(), [](const Plan& a, const Plan& b) {
      return a.step_ms < b.step_ms;
    });
    // With a graph or without, whichever is faster.
    std::set<std::pair<std::string, int64_t>> seen;
    if (chosen.plan) seen.emplace(chosen.precision(), chosen.micro_batch());
    std::erase_if(list, [&](const Plan& plan) {
      return !seen.emplace(plan.precision, plan.micro_batch).second;
    });
    return list;
  }

  /// The budget that such a peak needs.
  int64_t with_margin(int64_t peak_bytes) const {
    return static_cast<int64_t>(std::ceil(
        (static_cast<double>(peak_bytes) + 1) / (1 - request_.margin)));
  }

  const PlanRequest& request_;
  CostSource& costs_;
  std::vector<int64_t> all_sizes_;
  std::vector<int64_t> sizes_;  // of these, the ones looked at
  int64_t budget_;
  Evaluations evaluations_;
  std::vector<Choice> choices_;
  /// By precision: the smallest size without room, or hopelessly slow.
  std::map<std::string, int64_t> left_out_from_;
  std::set<int64_t> cannot_run_;
  std::set<std::pair<Key, std::string>> cannot_be_tried_;
  int comparisons_ = 0;
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
