#include "ops/channels_last.h"

#include "ops/kernels.h"

#include <torch/types.h>

#include <limits>

namespace reprise::detail {
namespace {

using torch::Tensor;

/// Whether accesses of 16 bytes are possible.
bool has_aligned_rows(const Tensor& x) {
  return is_aligned(x, 16 / static_cast<int64_t>(x.element_size()));
}

}  // namespace

bool rows_eligible(const Tensor& x) {
  if (!kernels_available(x.device()) || !(is_float32(x) || is_half(x)) ||
      x.dim() != 4 || x.numel() == 0 ||
      !x.is_contiguous(at::MemoryFormat::ChannelsLast)) {
    return false;
  }
  // Rows are 32-bit integers, and so is the number of blocks.
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max() / 4;
  const kernels::RowsShape shape = rows_shape(x, 0, false);
  return shape.channels % shape.vector_size() == 0 && shape.rows() < kMax &&
         shape.samples * shape.channels < kMax;
}

bool pool_of_rows_eligible(const Tensor& x, const ops::MaxPoolOptions& pool) {
  const auto fits = [&](int64_t side) {
    return side + 2 * pool.padding >= pool.kernel;
  };
  return (pool.kernel == 2 || pool.kernel == 3) &&
         pool.step() == kernels::PoolWindow::kStride && pool.padding >= 0 &&
         pool.padding <= pool.kernel / 2 && fits(x.size(2)) && fits(x.size(3));
}

kernels::RowsShape rows_shape(const Tensor& x, int64_t groups, bool pooled) {
  kernels::RowsShape shape;
  shape.samples = x.size(0);
  shape.channels = x.size(1);
  shape.height = x.size(2);
  shape.width = x.size(3);
  shape.groups = groups;
  shape.type = kernel_dtype(x);
  shape.pooled = pooled;
  return shape;
}

kernels::PoolWindow pool_window(const ops::MaxPoolOptions& pool) {
  return {pool.kernel, pool.padding};
}

Tensor empty_pooled(const Tensor& x, const kernels::PoolWindow& window,
                    torch::ScalarType type) {
  return torch::empty({x.size(0), x.size(1), window.outputs(x.size(2)),
                       window.outputs(x.size(3))},
                      x.options().dtype(type), at::MemoryFormat::ChannelsLast);
}

Tensor as_rows(const Tensor& gradient, torch::ScalarType type) {
  const Tensor rows =
      gradient.to(type).contiguous(at::MemoryFormat::ChannelsLast);
  return has_aligned_rows(rows) ? rows
                                : rows.clone(at::MemoryFormat::ChannelsLast);
}

}  // namespace reprise::detail
