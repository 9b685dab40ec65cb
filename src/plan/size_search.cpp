#include "plan/size_search.h"

#include "plan/candidate_sizes.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace reprise::detail {
namespace {

// A precision is not measured at larger sizes if it takes more than
// kMaxTimeRatio times as long as the first precision at one size. The same
// holds if it takes more than kSlowRatio times as long at one size, and the
// ratio is even larger at a larger size.
constexpr double kMaxTimeRatio = 4;
constexpr double kSlowRatio = 1.5;

}  // namespace

SizeSearch::SizeSearch(const PlanRequest& request, CostSource& costs,
                       int64_t budget)
    : request_(request),
      costs_(costs),
      budget_(budget),
      all_sizes_(candidate_sizes(request)),
      sizes_(subsample_sizes(all_sizes_)) {}

bool SizeSearch::is_candidate(Precision precision, int64_t size) const {
  const int64_t rest = request_.global_batch % size;
  if (cannot_run_.count(size) > 0 || cannot_run_.count(rest) > 0) {
    return false;
  }
  const auto excluded = excluded_from_.find(precision);
  return excluded == excluded_from_.end() || size < excluded->second;
}

void SizeSearch::measure_initial(Precision precision, const HasPlan& has_plan) {
  int64_t last = 0;  // measured
  for (const int64_t size : sizes_) {
    const bool end = size == sizes_.back();
    if (size < 4 * last && !end) continue;
    const auto& profile = costs_.profile(precision);
    if (profile.sizes.size() >= 2 && !may_fit(profile, size)) break;
    if (measure(precision, size)) {
      last = size;
      if (is_too_slow(precision, size, has_plan)) {
        exclude_from(precision, size);
        break;
      }
    } else if (cannot_run_.count(size) == 0) {
      break;
    }
  }
}

bool SizeSearch::measure(Precision precision, int64_t size) {
  try {
    if (costs_.measure(precision, size)) return true;
  } catch (const c10::Error&) {
    if (size == sizes_.back()) throw;
    cannot_run_.insert(size);
    return false;
  }
  exclude_from(precision, size);
  return false;
}

void SizeSearch::exclude_from(Precision precision, int64_t size) {
  const auto excluded = excluded_from_.emplace(precision, size).first;
  excluded->second = std::min(excluded->second, size);
}

/// Many CPUs emulate half-precision matrix products and are slower with them by
/// an order of magnitude. Measuring all sizes would then take longer than the
/// training saves. Returns false if the first precision does not fit.
bool SizeSearch::is_too_slow(Precision precision, int64_t size,
                             const HasPlan& has_plan) {
  const Precision first = request_.precisions.front();
  if (precision == first || !costs_.profile(first).measured(size)) {
    return false;
  }
  const double ratio = time_ratio(precision, first, size);
  bool too_slow = ratio > kMaxTimeRatio;
  for (const SizeCosts& other : costs_.profile(precision).sizes) {
    const int64_t smaller = other.micro_batch;
    if (smaller >= size || !costs_.profile(first).measured(smaller)) continue;
    const double before = time_ratio(precision, first, smaller);
    too_slow |= before > kSlowRatio && ratio > before;
  }
  return too_slow && has_plan(first);
}

/// Returns the stages' time at one precision divided by that at another.
double SizeSearch::time_ratio(Precision precision, Precision other,
                              int64_t size) const {
  const auto ms = [&](Precision at) {
    double sum = 0;
    for (const auto& stage : costs_.profile(at).at(size).chain_costs.stages) {
      sum += stage.forward_ms + stage.backward_ms;
    }
    return sum;
  };
  return ms(precision) / ms(other);
}

/// Compares the budget with a lower bound on the peak: the most expensive stage
/// with nothing else kept, by the costs measured so far.
bool SizeSearch::may_fit(const CostProfile& profile, int64_t size) const {
  const SizeCosts costs = profile.at(size);
  int64_t most = 0;
  for (const auto& stage : costs.chain_costs.stages) {
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

bool SizeSearch::refine(int64_t size) {
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

}  // namespace reprise::detail
