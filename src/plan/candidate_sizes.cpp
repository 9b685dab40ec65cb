#include "plan/candidate_sizes.h"

#include <cmath>
#include <set>

namespace reprise::detail {
namespace {

constexpr size_t kMaxSizes = 20;

}  // namespace

std::vector<int64_t> candidate_sizes(const PlanRequest& request) {
  if (request.micro_batch > 0) return {request.micro_batch};
  const int64_t n = request.global_batch;
  std::set<int64_t> sizes;
  for (int64_t k = 1; k <= n; ++k) sizes.insert((n + k - 1) / k);
  return {sizes.begin(), sizes.end()};
}

std::vector<int64_t> subsample_sizes(const std::vector<int64_t>& sizes) {
  if (sizes.size() <= kMaxSizes) return sizes;
  std::vector<int64_t> list;
  const auto last = static_cast<double>(sizes.back());
  const double ratio = std::pow(last / static_cast<double>(sizes.front()),
                                1.0 / double(kMaxSizes - 1));
  double next = 0;
  for (const int64_t size : sizes) {
    if (static_cast<double>(size) < next && size != sizes.back()) continue;
    list.push_back(size);
    next = static_cast<double>(size) * ratio;
  }
  return list;
}

}  // namespace reprise::detail
