#pragma once

#include <torch/types.h>
#include <torch/utils.h>

#include <cstdint>
#include <vector>

/// A backward copies a gradient that does not lie in memory as its operator wants it, so
/// what a stage takes depends on how the stage behind it hands its gradients back.
namespace reprise {

/// How the gradients of a boundary's tensors lie in memory: their strides. Empty: there
/// is none, or it is not known.
using Strides = std::vector<int64_t>;
using Layout = std::vector<Strides>;

/// Strides of a dimension of one element mean nothing.
inline bool lie_alike(const torch::Tensor& gradient, const Strides& strides) {
  for (int64_t d = 0; d < gradient.dim(); ++d) {
    if (gradient.size(d) > 1 &&
        gradient.stride(d) != strides.at(static_cast<size_t>(d))) {
      return false;
    }
  }
  return true;
}

/// Ones, for the gradient of `output`.
inline torch::Tensor ones_for(const torch::Tensor& output,
                              const Strides& strides) {
  torch::Tensor dense = torch::ones_like(output);
  if (strides.empty() || lie_alike(dense, strides)) return dense;
  int64_t last = 0;
  for (int64_t d = 0; d < output.dim(); ++d) {
    last += (output.size(d) - 1) * strides.at(static_cast<size_t>(d));
  }
  return torch::ones({last + 1}, dense.options())
      .as_strided(output.sizes(), strides);
}

}  // namespace reprise
