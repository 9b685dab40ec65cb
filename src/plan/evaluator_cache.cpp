#include "plan/evaluator_cache.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <utility>

namespace reprise::detail {
namespace {

// Limit for the tables of all solvers together. Solvers that were dropped are
// recreated when needed.
constexpr int64_t kMaxSolverBytes = int64_t{256} << 20;
// Errors of predicted peaks below these shares are not corrected: the margin of the budget
// covers them, and each correction has to be tried.
constexpr int64_t kLeastMore = 200;  // 0.5 %
constexpr int64_t kLeastLess = 100;  // 1 %
// Nor are those of a few small tensors.
constexpr int64_t kLeastBytes = 8192;

/// Returns the bytes beyond a predicted peak, or 0 if they hardly matter.
int64_t relevant(int64_t extra_bytes, int64_t peak_bytes) {
  const bool more =
      extra_bytes > std::max(kLeastBytes, peak_bytes / kLeastMore);
  const bool less =
      extra_bytes < -std::max(kLeastBytes, peak_bytes / kLeastLess);
  return more || less ? extra_bytes : 0;
}

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
  const int64_t extra_bytes = extra_near(key, budget_);
  Entry& cached = entry(key);
  if (!cached.fastest || cached.fastest_extra_bytes != extra_bytes) {
    cached.fastest.emplace(cached.evaluator->fastest(budget_, extra_bytes));
    cached.fastest_extra_bytes = extra_bytes;
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

EvaluatorCache::Trials EvaluatorCache::trials(const CandidateKey& key) const {
  const auto& [precision, size, graph, update] = key;
  Trials trials;
  const CostProfile& profile = costs_.profile(precision);
  const UpdateMode timed =
      timed_update(profile, update, size, request_.global_batch);
  for (const TriedSchedule& timing : profile.tried) {
    if (timing.micro_batch == size && timing.graph == graph &&
        timing.update == timed) {
      trials[timing.schedule] = {timing.ms, timing.extra_bytes};
    }
  }
  return trials;
}

std::vector<Plan> EvaluatorCache::tried(const CandidateKey& key) {
  std::vector<Plan> plans;
  for (const auto& [schedule, trial] : trials(key)) {
    const Plan& predicted = plan_of(key, schedule);
    plans.push_back(evaluator(key).measured(
        predicted, trial.ms,
        relevant(trial.extra_bytes, predicted.peak_bytes)));
  }
  return plans;
}

int64_t EvaluatorCache::extra_near(const CandidateKey& key,
                                   int64_t peak_bytes) {
  const Trials own = trials(key);
  if (own.empty()) return extra_of_other_sizes(key);
  int64_t nearest = std::numeric_limits<int64_t>::max();
  int64_t extra_bytes = 0;
  for (const auto& [schedule, trial] : own) {
    const int64_t predicted = plan_of(key, schedule).peak_bytes;
    const int64_t distance =
        std::abs(predicted + trial.extra_bytes - peak_bytes);
    if (distance >= nearest) continue;
    nearest = distance;
    extra_bytes = relevant(trial.extra_bytes, predicted);
  }
  return extra_bytes;
}

int64_t EvaluatorCache::extra_of_other_sizes(const CandidateKey& key) {
  const auto& [precision, size, graph, update] = key;
  std::optional<int64_t> most;
  int64_t nearest = std::numeric_limits<int64_t>::max();
  for (const SizeCosts& other : costs_.profile(precision).sizes) {
    const CandidateKey there{precision, other.micro_batch, graph, update};
    const int64_t distance = std::abs(other.micro_batch - size);
    if (distance == 0 || distance >= nearest) continue;
    std::optional<int64_t> extra;
    for (const auto& [schedule, trial] : trials(there)) {
      const int64_t predicted = plan_of(there, schedule).peak_bytes;
      const int64_t bytes = relevant(trial.extra_bytes, predicted);
      extra = std::max(extra.value_or(bytes), bytes);
    }
    if (!extra) continue;
    most = extra;
    nearest = distance;
  }
  return most.value_or(0);
}

Plan EvaluatorCache::calibrated(const Plan& plan) {
  const CandidateKey key = key_of(plan);
  const Trials known = trials(key);
  if (known.empty()) return plan;
  const Plan predicted = evaluator(key).plan_of(plan.schedule);
  const auto own = known.find(plan.schedule.to_text());
  int64_t nearest = std::numeric_limits<int64_t>::max();
  double ratio = 1;
  int64_t extra_bytes = 0;
  for (const auto& [schedule, trial] : known) {
    const Plan& other = plan_of(key, schedule);
    const bool is_own = own != known.end() && own->first == schedule;
    const int64_t distance =
        is_own ? -1 : std::abs(other.peak_bytes - predicted.peak_bytes);
    if (distance >= nearest) continue;
    nearest = distance;
    ratio = trial.ms / other.micro_ms;
    extra_bytes = relevant(trial.extra_bytes, other.peak_bytes);
  }
  return evaluator(key).measured(predicted, predicted.micro_ms * ratio,
                                 extra_bytes);
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
