#pragma once

#include "ops/cuda/norm_act_pool.h"

#include <reprise/ops/pool.h>

#include <torch/types.h>

#include <cstdint>
#include <optional>

/// What the operators on channels-last images share: whether the kernels support a tensor,
/// and its description for them. Tested by tests/ops/norm_act_test.cpp.
namespace reprise::detail {

/// Whether x (N, C, H, W) is channels-last, aligned, and has a type and a number of
/// channels that the kernels for rows support.
bool rows_eligible(const torch::Tensor& x);

/// Whether the kernels support a pool of x.
bool pool_of_rows_eligible(const torch::Tensor& x,
                           const ops::MaxPoolOptions& pool);

/// `groups` 0: BatchNorm or no norm.
kernels::RowsShape rows_shape(const torch::Tensor& x, int64_t groups,
                              bool pooled);

kernels::PoolWindow pool_window(const ops::MaxPoolOptions& pool);

/// Uninitialized channels-last output of a pool of x.
torch::Tensor empty_pooled(const torch::Tensor& x,
                           const kernels::PoolWindow& window,
                           torch::ScalarType type);

/// `gradient`, or another tensor, as a channels-last tensor that the kernels can read.
torch::Tensor as_rows(const torch::Tensor& gradient, torch::ScalarType type);

struct PooledRows {
  torch::Tensor y;
  torch::Tensor positions;  ///< of the maxima in their windows
};
/// Max pool of activation(x + bias); `bias` may be undefined.
PooledRows pool_rows(const torch::Tensor& x, const torch::Tensor& bias,
                     kernels::Activation activation,
                     const kernels::PoolWindow& window);

struct UnpooledRows {
  torch::Tensor dx;
  torch::Tensor scratch;  ///< partial sums of dx over rows, for norm_sums()
};
/// Gradient of the input of a max pool, which had these sizes.
UnpooledRows unpool_rows(const torch::Tensor& gradient,
                         const torch::Tensor& positions, at::IntArrayRef sizes,
                         const kernels::PoolWindow& window);

}  // namespace reprise::detail
