#include "candidate_sizes.h"

#include <cmath>
#include <set>

namespace reprise::plan_detail {
namespace {

constexpr size_t kMostSizes = 20;

}  // namespace

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

}  // namespace reprise::plan_detail
