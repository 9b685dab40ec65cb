#include "plan/evaluator_cache.h"

#include <cstdlib>
#include <limits>
#include <utility>

namespace reprise::detail {
namespace {

// Limit for the tables of all solvers together. Solvers that were dropped are
// recreated when needed.
constexpr int64_t kMaxSolverBytes = int64_t{256} << 20;

}  // namespace

EvaluatorCache::EvaluatorCache(const PlanRequest& request, CostSource& costs,
                               int64_t budget)
    : request_(request), costs_(costs), budget_(budget) {}

EvaluatorCache::Entry& EvaluatorCache::entry(const CandidateKey& key) {
  const auto& [precision, size, graph, update] = key;
  const CostProfile& profile = costs_.profile(precision);
  Entry& found = entries_[key];
  found.last_use = ++uses_;
  const size_t sizes = profile.sizes.size();
  const bool same =
      found.sizes == sizes && found.update_ms == profile.update_ms;
  if (found.evaluator && same) return found;
  Entry made;
  made.update_ms = profile.update_ms;
  made.sizes = sizes;
  made.exact = profile.measured(size);
  made.last_use = found.last_use;
  made.evaluator = std::make_unique<Evaluator>(
      profile, size, request_.global_batch, request_.strategy, graph, update);
  // Measurements of other sizes do not change the costs of a measured size.
  if (found.evaluator && found.exact) {
    made.evaluator->take_solver(*found.evaluator);
  }
  found = std::move(made);
  return found;
}

const std::optional<Plan>& EvaluatorCache::fastest(const CandidateKey& key) {
  Entry& cached = entry(key);
  if (!cached.fastest) {
    cached.fastest.emplace(cached.evaluator->fastest(budget_));
    limit_solvers(cached);
  }
  return *cached.fastest;
}

const Plan& EvaluatorCache::smallest(const CandidateKey& key) {
  Entry& cached = entry(key);
  if (!cached.smallest) {
    cached.smallest.emplace(cached.evaluator->smallest());
    limit_solvers(cached);
  }
  return *cached.smallest;
}

std::vector<Plan> EvaluatorCache::frontier(const CandidateKey& key,
                                           int points) {
  Entry& cached = entry(key);
  auto plans = cached.evaluator->frontier(points);
  limit_solvers(cached);
  return plans;
}

bool EvaluatorCache::is_floor(const Plan& plan) {
  Entry& cached = entry(key_of(plan));
  const bool is = cached.evaluator->is_floor(plan);
  limit_solvers(cached);
  return is;
}

const Plan& EvaluatorCache::plan_of(const CandidateKey& key,
                                    const std::string& schedule) {
  Entry& cached = entry(key);
  const auto found = cached.plans.find(schedule);
  if (found != cached.plans.end()) return found->second;
  const auto stages =
      static_cast<int>(costs_.profile(std::get<0>(key)).stages.size());
  Plan plan =
      cached.evaluator->plan_of(Schedule::parse("optimal", stages, schedule));
  return cached.plans.emplace(schedule, std::move(plan)).first->second;
}

bool EvaluatorCache::measured(const CandidateKey& key) const {
  return costs_.profile(std::get<0>(key)).measured(std::get<1>(key));
}

EvaluatorCache::Times EvaluatorCache::times_of(const CandidateKey& key) const {
  const auto& [precision, size, graph, update] = key;
  Times times;
  const CostProfile& profile = costs_.profile(precision);
  const UpdateMode timed =
      timed_update(profile, update, size, request_.global_batch);
  for (const TriedSchedule& timing : profile.tried) {
    if (timing.micro_batch == size && timing.graph == graph &&
        timing.update == timed) {
      times[timing.schedule] = timing.ms;
    }
  }
  return times;
}

Plan EvaluatorCache::calibrated(const Plan& plan) {
  const CandidateKey key = key_of(plan);
  const Times times = times_of(key);
  if (times.empty()) return plan;
  const auto known = times.find(plan.schedule.to_text());
  if (known != times.end())
    return evaluator(key).with_time(plan, known->second);
  int64_t nearest = std::numeric_limits<int64_t>::max();
  double ratio = 1;
  for (const auto& [schedule, ms] : times) {
    const Plan& other = plan_of(key, schedule);
    const int64_t distance = std::abs(other.peak_bytes - plan.peak_bytes);
    if (distance >= nearest) continue;
    nearest = distance;
    ratio = ms / other.micro_ms;
  }
  return evaluator(key).with_time(plan, plan.micro_ms * ratio);
}

void EvaluatorCache::limit_solvers(const Entry& current) {
  int64_t bytes = 0;
  for (const auto& [key, cached] : entries_) {
    if (cached.evaluator) bytes += cached.evaluator->solver_bytes();
  }
  while (bytes > kMaxSolverBytes) {
    Entry* oldest = nullptr;
    for (auto& [key, cached] : entries_) {
      if (&cached == &current || !cached.evaluator ||
          !cached.evaluator->solved()) {
        continue;
      }
      if (oldest == nullptr || cached.last_use < oldest->last_use)
        oldest = &cached;
    }
    if (oldest == nullptr) return;
    bytes -= oldest->evaluator->solver_bytes();
    oldest->evaluator->drop_solver();
  }
}

}  // namespace reprise::detail
