#pragma once

#include "ops/cuda/add_norm.h"

#include <reprise/ops/norm.h>

#include <torch/types.h>

#include <optional>

/// Tested by tests/ops/add_norm_test.cpp and tests/ops/rms_norm_test.cpp.
namespace reprise::detail {

/// A norm over the last dimension.
struct RowNorm {
  kernels::NormKind kind = kernels::NormKind::kLayer;
  torch::Tensor weight{};
  torch::Tensor bias{};  ///< undefined with kRms
  double epsilon = 0;
};

/// x + branch, or x if `branch` is undefined, and its norm as `type`, with the CUDA kernels.
/// `post`: instead of the sum, the norm in the type of x. Returns nothing if they do not
/// support the arguments.
std::optional<ops::AddNormResult> run_add_norm(const torch::Tensor& x,
                                               const torch::Tensor& branch,
                                               const RowNorm& norm,
                                               torch::ScalarType type,
                                               bool post = false);

}  // namespace reprise::detail
