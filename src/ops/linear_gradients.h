#pragma once

#include <torch/types.h>

#include <functional>
#include <vector>

/// Gradients of linear layers that are added directly, for operators whose weights have
/// copies (WeightCopies). Not differentiable. Tested by tests/ops/linear_test.cpp.
namespace reprise::detail {

/// x (…, n) as (rows, n).
torch::Tensor as_matrix(const torch::Tensor& x);

/// For save_for_backward(). A view of an input would count as a leaf that requires a
/// gradient, which saved-tensor hooks cannot restore.
torch::Tensor as_saved(const torch::Tensor& rows);

/// weight.grad() += a b
void add_weight_gradient(torch::Tensor& weight, const torch::Tensor& a,
                         const torch::Tensor& b);

/// Gradient of the bias of the layer that has `weight`: the sum of the rows of dy, in
/// float32.
torch::Tensor bias_gradient(const torch::Tensor& dy,
                            const torch::Tensor& weight);

/// gradient += bias_gradient(dy, weight); `gradient` may be undefined.
void add_bias_gradient(torch::Tensor& gradient, const torch::Tensor& dy,
                       const torch::Tensor& weight);

/// Runs `work`, which adds to the gradient of `weight` and reads `used`; on a side stream if
/// nothing else in the backward adds to it, in half precision. Float32 products fill a
/// device by themselves, and a second stream would need a workspace of its own.
void run_gradient_work(const torch::Tensor& weight,
                       std::vector<torch::Tensor> used,
                       const std::function<void()>& work);

}  // namespace reprise::detail
