#pragma once

#include <reprise/ops/norm.h>

#include <torch/types.h>

#include <cstdint>

/// The implementations of ops::norm_act() with CUDA kernels, by the layout of x. Each is
/// called only if its `eligible` function returns true.
namespace reprise::detail {

struct NormSettings {
  int64_t groups = 0;  ///< 0: BatchNorm
  double epsilon = 0;
  torch::Tensor running_mean{},
      running_variance{};  ///< undefined if not tracked
  double momentum = 0;
};

/// Contiguous (N, C, H, W).
bool norm_planes_eligible(const torch::Tensor& x, const torch::Tensor& weight,
                          const torch::Tensor& bias,
                          const ops::NormActOptions& options);
torch::Tensor norm_act_planes(const torch::Tensor& x,
                              const torch::Tensor& weight,
                              const torch::Tensor& bias,
                              const NormSettings& settings,
                              const ops::NormActOptions& options);

/// Channels-last.
bool norm_rows_eligible(const torch::Tensor& x, const torch::Tensor& weight,
                        const torch::Tensor& bias,
                        const ops::NormActOptions& options);
torch::Tensor norm_act_rows(const torch::Tensor& x, const torch::Tensor& weight,
                            const torch::Tensor& bias,
                            const NormSettings& settings,
                            const ops::NormActOptions& options);

}  // namespace reprise::detail
