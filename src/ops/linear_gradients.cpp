// Tested by tests/ops/linear_test.cpp.
#include "ops/linear_gradients.h"

#include "compat/gemm.h"
#include "compat/side_stream.h"
#include "ops/cuda/column_sums.h"
#include "ops/gemm.h"
#include "ops/kernels.h"

#include <reprise/ops/weight_copies.h>

#include <utility>

namespace reprise::detail {
namespace {

using torch::Tensor;

/// Whether the kernel can add up the rows of `dy`.
bool column_sums_eligible(const Tensor& dy) {
  KernelOperand matrix;
  matrix.type = KernelOperand::Type::kHalf;
  matrix.min_dim = matrix.max_dim = 2;
  return kernel_eligible(dy, matrix);
}

/// sums = (add ? sums : 0) + sum of the rows, with the kernel.
void run_column_sums(Tensor& sums, const Tensor& dy, bool add) {
  kernels::ColumnSums launch;
  launch.shape = {dy.size(0), dy.size(1), kernel_dtype(dy)};
  const Tensor scratch =
      torch::empty({launch.shape.scratch_size()}, sums.options());
  launch.matrix = dy.data_ptr();
  launch.scratch = scratch.data_ptr<float>();
  launch.sums = sums.data_ptr<float>();
  launch.add = add;
  kernels::column_sums(launch, kernel_stream(dy));
}

}  // namespace

Tensor as_matrix(const Tensor& x) {
  return x.dim() == 2 ? x : x.reshape({-1, x.size(-1)});
}

Tensor as_saved(const Tensor& rows) {
  return rows.detach();
}

torch::ScalarType gradient_type(const Tensor& weight) {
  return weight.element_size() == 2 ? torch::kFloat : weight.scalar_type();
}

void add_weight_gradient(Tensor& weight, const Tensor& a, const Tensor& b) {
  Tensor& gradient = weight.mutable_grad();
  if (gradient.defined()) {
    gemm_add(gradient, a, b);
  } else {
    gradient = gemm_as(a, b, gradient_type(weight));
  }
}

// With few columns LibTorch's sum() does not fill a GPU; without kernels, a matrix product
// with ones does.
Tensor bias_gradient(const Tensor& dy, const Tensor& weight) {
  if (column_sums_eligible(dy)) {
    Tensor sums = torch::empty({dy.size(1)}, dy.options().dtype(torch::kFloat));
    run_column_sums(sums, dy, false);
    return sums;
  }
  const Tensor ones = WeightCopies::ones(weight, dy.size(0));
  return ones.defined() ? compat::gemm_as(ones, dy, torch::kFloat).view({-1})
                        : dy.sum(0, false, torch::kFloat);
}

void add_bias_gradient(Tensor& gradient, const Tensor& dy,
                       const Tensor& weight) {
  if (!gradient.defined()) {
    gradient = bias_gradient(dy, weight);
  } else if (column_sums_eligible(dy) && is_float32(gradient) &&
             gradient.is_contiguous()) {
    run_column_sums(gradient, dy, true);
  } else if (const Tensor ones = WeightCopies::ones(weight, dy.size(0));
             ones.defined()) {
    Tensor row = gradient.view({1, -1});
    compat::gemm_add(row, ones, dy);
  } else {
    gradient.add_(bias_gradient(dy, weight));
  }
}

void run_gradient_work(const Tensor& weight, const Tensor& rows,
                       const Tensor& dy, const std::function<void()>& product,
                       const std::function<void()>& sums) {
  constexpr int64_t kFewRows = 512;
  const bool aside =
      rows.element_size() == 2 && WeightCopies::has_single_use(weight);
  if (aside && rows.size(0) <= kFewRows) {
    compat::run_on_side_stream({rows, dy}, [&] {
      product();
      if (sums) sums();
    });
    return;
  }
  if (sums && aside) {
    compat::run_on_side_stream({dy}, sums);
  } else if (sums) {
    sums();
  }
  product();
}

}  // namespace reprise::detail
