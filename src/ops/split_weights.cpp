#include "ops/split_weights.h"

#include "ops/cuda/split_weights.h"
#include "ops/kernels.h"

#include <algorithm>

namespace reprise::detail {
namespace {

using torch::Tensor;

/// Runs the kernel; false if it does not support the weight.
bool run_split_kernel(const Tensor& weight, bool merge) {
  if (!kernels_available(weight.device()) || !is_aligned(weight, 4) ||
      weight.size(1) > kernels::SplitWeights::kMaxColumns) {
    return false;
  }
  kernels::SplitWeights launch;
  launch.rows = weight.size(0);
  launch.columns = weight.size(1);
  launch.weights = weight.data_ptr<float>();
  launch.merge = merge;
  kernels::split_weights(launch, kernel_stream(weight));
  return true;
}

/// Calls `body` for blocks of rows, so that its temporaries are small beside the weight.
template <class Body>
void for_row_blocks(const Tensor& weight, const Body& body) {
  const int64_t values = int64_t{1} << (weight.is_cuda() ? 22 : 14);
  const int64_t rows = weight.size(0);
  const int64_t step = std::max<int64_t>(1, values / weight.size(1));
  for (int64_t at = 0; at < rows; at += step) {
    body(weight.narrow(0, at, std::min(step, rows - at)));
  }
}

}  // namespace

bool can_split(const Tensor& weight) {
  return weight.dim() == 2 && weight.scalar_type() == torch::kFloat &&
         weight.is_contiguous() && weight.size(1) % 8 == 0 &&
         weight.numel() > 0;
}

Tensor upper_half(const Tensor& weight) {
  return weight.detach().view(torch::kBFloat16).narrow(1, 0, weight.size(1));
}

// Neither counts as a change of the weight, as kernels do not.
void split_weight(const Tensor& weight) {
  const torch::NoGradGuard no_grad;
  if (run_split_kernel(weight, /*merge=*/false)) return;
  for_row_blocks(weight.variable_data(), [](const Tensor& rows) {
    const Tensor bits = rows.view(torch::kInt);
    const Tensor upper = (bits + 0x8000).__rshift__(16);
    const Tensor lower = bits - upper.__lshift__(16);
    rows.view(torch::kShort)
        .copy_(
            torch::cat({upper.to(torch::kShort), lower.to(torch::kShort)}, 1));
  });
}

void merge_weight(const Tensor& weight) {
  const torch::NoGradGuard no_grad;
  if (run_split_kernel(weight, /*merge=*/true)) return;
  for_row_blocks(weight.variable_data(), [](const Tensor& rows) {
    const Tensor halves = rows.view(torch::kShort).to(torch::kInt);
    const int64_t columns = rows.size(1);
    rows.view(torch::kInt)
        .copy_(halves.narrow(1, 0, columns).__lshift__(16) +
               halves.narrow(1, columns, columns));
  });
}

}  // namespace reprise::detail
