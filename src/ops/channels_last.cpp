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

PooledRows pool_rows(const Tensor& x, const Tensor& bias,
                     kernels::Activation activation,
                     const kernels::PoolWindow& window) {
  const PooledRows pooled{empty_pooled(x, window, x.scalar_type()),
                          empty_pooled(x, window, torch::kUInt8)};
  kernels::NormActPoolForward launch;
  launch.shape = rows_shape(x, 0, true);
  launch.activation = activation;
  launch.norm.x = x.data_ptr();
  launch.norm.bias = float_data(bias);
  launch.window = window;
  launch.y = pooled.y.data_ptr();
  launch.positions = pooled.positions.data_ptr<uint8_t>();
  kernels::norm_act_pool_forward(launch, kernel_stream(x));
  return pooled;
}

UnpooledRows unpool_rows(const Tensor& gradient, const Tensor& positions,
                         at::IntArrayRef sizes,
                         const kernels::PoolWindow& window) {
  const Tensor dy = as_rows(gradient, gradient.scalar_type());
  const Tensor dx =
      torch::empty(sizes, dy.options(), at::MemoryFormat::ChannelsLast);
  kernels::NormActPoolSums launch;
  launch.shape = rows_shape(dx, 0, true);
  const Tensor scratch = torch::empty({launch.shape.scratch_size()},
                                      dy.options().dtype(torch::kFloat));
  launch.window = window;
  launch.dy = dy.data_ptr();
  launch.positions = positions.data_ptr<uint8_t>();
  launch.dx = dx.data_ptr();
  launch.scratch = scratch.data_ptr<float>();
  kernels::norm_act_pool_sums(launch, kernel_stream(dx));
  return {dx, scratch};
}

}  // namespace reprise::detail
