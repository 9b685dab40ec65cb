#pragma once

#include <torch/types.h>
#include <torch/utils.h>

#include <cstdint>
#include <vector>

/// Memory layouts of gradients. An operator copies a gradient whose layout it
/// does not support, so the memory of a stage's backward depends on the layout
/// in which the next stage returns its gradients. Tested by
/// tests/recompute/stage_costs_test.cpp.
namespace reprise {

/// Strides of the gradient of each tensor of a boundary. Empty if there is no
/// gradient or its layout is unknown.
using Strides = std::vector<int64_t>;
using Layout = std::vector<Strides>;

/// Returns whether `gradient` has these strides. Dimensions of size 1 are
/// ignored.
inline bool has_layout(const torch::Tensor& gradient, const Strides& strides) {
  for (int64_t d = 0; d < gradient.dim(); ++d) {
    if (gradient.size(d) > 1 &&
        gradient.stride(d) != strides.at(static_cast<size_t>(d))) {
      return false;
    }
  }
  return true;
}

/// Returns a gradient of ones for `output` with these strides, or dense if they
/// are empty.
inline torch::Tensor ones_for(const torch::Tensor& output,
                              const Strides& strides) {
  torch::Tensor dense = torch::ones_like(output);
  if (strides.empty() || has_layout(dense, strides)) return dense;
  int64_t last = 0;
  for (int64_t d = 0; d < output.dim(); ++d) {
    last += (output.size(d) - 1) * strides.at(static_cast<size_t>(d));
  }
  return torch::ones({last + 1}, dense.options())
      .as_strided(output.sizes(), strides);
}

}  // namespace reprise
