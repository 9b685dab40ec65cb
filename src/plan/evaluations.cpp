#include "plan/evaluations.h"

#include <cstdlib>
#include <limits>
#include <utility>

namespace reprise::detail {
namespace {

// Of all solvers together; beyond, those used longest ago are made again when needed.
constexpr int64_t kMostSolverBytes = int64_t{256} << 20;

}  // namespace

Evaluations::Evaluations(const PlanRequest& request, CostSource& costs,
                         int64_t budget)
    : request_(request), costs_(costs), budget_(budget) {}

Evaluations::Entry& Evaluations::entry(const Key& key) {
  const auto& [precision, size, graph] = key;
  const CostProfile& profile = costs_.profile(precision);
  Entry& found = entries_[key];
  found.used = ++uses_;
  const size_t known = profile.sizes.size();
  if (found.evaluator && found.known == known) return found;
  Entry made;
  made.known = known;
  made.exact = profile.measured(size);
  made.used = found.used;
  made.evaluator = std::make_unique<Evaluator>(
      profile, size, request_.global_batch, request_.strategy, graph);
  // What other sizes cost changes nothing for one that was measured itself.
  if (found.evaluator && found.exact) {
    made.evaluator->take_solver(*found.evaluator);
  }
  found = std::move(made);
  return found;
}

const std::optional<Plan>& Evaluations::fastest(const Key& key) {
  Entry& one = entry(key);
  if (!one.fastest) {
    one.fastest.emplace(one.evaluator->fastest(budget_));
    limit_solvers(one);
  }
  return *one.fastest;
}

const Plan& Evaluations::smallest(const Key& key) {
  Entry& one = entry(key);
  if (!one.smallest) {
    one.smallest.emplace(one.evaluator->smallest());
    limit_solvers(one);
  }
  return *one.smallest;
}

std::vector<Plan> Evaluations::frontier(const Key& key, int points) {
  Entry& one = entry(key);
  auto plans = one.evaluator->frontier(points);
  limit_solvers(one);
  return plans;
}

bool Evaluations::is_floor(const Plan& plan) {
  Entry& one = entry(key_of(plan));
  const bool is = one.evaluator->is_floor(plan);
  limit_solvers(one);
  return is;
}

const Plan& Evaluations::plan_of(const Key& key, const std::string& schedule) {
  Entry& one = entry(key);
  const auto found = one.plans.find(schedule);
  if (found != one.plans.end()) return found->second;
  const auto stages =
      static_cast<int>(costs_.profile(std::get<0>(key)).stages.size());
  Plan plan =
      one.evaluator->plan_of(Schedule::parse("optimal", stages, schedule));
  return one.plans.emplace(schedule, std::move(plan)).first->second;
}

bool Evaluations::measured(const Key& key) const {
  return costs_.profile(std::get<0>(key)).measured(std::get<1>(key));
}

Evaluations::Times Evaluations::times_of(const Key& key) const {
  const auto& [precision, size, graph] = key;
  Times times;
  for (const TriedSchedule& one : costs_.profile(precision).tried) {
    if (one.micro_batch == size && one.graph == graph) {
      times[one.schedule] = one.ms;
    }
  }
  return times;
}

Plan Evaluations::likely(const Plan& plan) {
  const Key key = key_of(plan);
  const Times times = times_of(key);
  if (times.empty()) return plan;
  const auto known = times.find(plan.schedule.to_text());
  if (known != times.end()) return of(key).with_time(plan, known->second);
  int64_t nearest = std::numeric_limits<int64_t>::max();
  double ratio = 1;
  for (const auto& [schedule, ms] : times) {
    const Plan& other = plan_of(key, schedule);
    const int64_t distance = std::abs(other.peak_bytes - plan.peak_bytes);
    if (distance >= nearest) continue;
    nearest = distance;
    ratio = ms / other.micro_ms;
  }
  return of(key).with_time(plan, plan.micro_ms * ratio);
}

void Evaluations::limit_solvers(const Entry& present) {
  int64_t bytes = 0;
  for (const auto& [key, one] : entries_) {
    if (one.evaluator) bytes += one.evaluator->solver_bytes();
  }
  while (bytes > kMostSolverBytes) {
    Entry* oldest = nullptr;
    for (auto& [key, one] : entries_) {
      if (&one == &present || !one.evaluator || !one.evaluator->solved()) {
        continue;
      }
      if (oldest == nullptr || one.used < oldest->used) oldest = &one;
    }
    if (oldest == nullptr) return;
    bytes -= oldest->evaluator->solver_bytes();
    oldest->evaluator->drop_solver();
  }
}

}  // namespace reprise::detail
