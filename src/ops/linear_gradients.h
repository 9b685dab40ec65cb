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

/// Type of a weight's gradient: float32 if the weight has half precision.
torch::ScalarType gradient_type(const torch::Tensor& weight);

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

/// Runs `product` and `sums`, which add to the gradients of `weight` and of its bias.
/// `product` reads `rows` and `dy`, `sums` reads `dy` and may be empty. In half precision, if nothing else in the backward adds to these, `sums`
/// runs on a side stream: it is limited by memory, and the products beside it by
/// arithmetic. So does `product` if there are too few rows to fill a device. Float32
/// products fill it by themselves, and a second stream would need a workspace of its own.
void run_gradient_work(const torch::Tensor& weight, const torch::Tensor& rows,
                       const torch::Tensor& dy,
                       const std::function<void()>& product,
                       const std::function<void()>& sums);

}  // namespace reprise::detail
