#pragma once

#include "compat/saved_tensors.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <utility>

/// Helpers for operators that derive from torch::autograd::Function.
/// Tested by tests/ops/linear_test.cpp.
namespace reprise::detail {

/// Arguments of torch::autograd::Function::apply() must be defined: an empty tensor like
/// `like` stands for an undefined one.
inline torch::Tensor defined_or_empty(const torch::Tensor& tensor,
                                      const torch::Tensor& like) {
  return tensor.defined() ? tensor : like.detach().new_empty({0});
}
inline torch::Tensor undefined_if_empty(const torch::Tensor& tensor) {
  return tensor.numel() == 0 ? torch::Tensor() : tensor;
}

/// For operators that save nothing that depends on their output, before they compute it, which
/// a recomputation may not need. All tensors must be defined.
inline void save_before_output(torch::autograd::AutogradContext& context,
                               torch::autograd::variable_list tensors) {
  compat::SavedTensorScope::before_output(tensors);
  context.save_for_backward(std::move(tensors));
}

/// For the start of a backward. Throws c10::Error if it is differentiated itself; `op` is
/// the name of the operator and `alternative` one that supports it, if any.
inline void check_first_order(const char* op, const char* alternative = "") {
  TORCH_CHECK(!torch::GradMode::is_enabled(), "[", op,
              "] has no second derivative",
              *alternative == '\0' ? "" : "; use ", alternative);
}

}  // namespace reprise::detail
