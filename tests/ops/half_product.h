#pragma once

#include "support.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>

namespace reprise::testing {

/// Error of LibTorch's own bf16 product with sums over `depth` values, against double.
/// About 2e-3 if the sums are in single precision; LibTorch 1.13 adds up in bf16 on
/// processors for which oneDNN has no such product, and no result can be better there.
inline double half_product_error(int64_t depth) {
  const torch::NoGradGuard no_grad;
  const auto options = torch::TensorOptions(device()).dtype(torch::kBFloat16);
  const auto a = torch::randn({64, depth}, options);
  const auto b = torch::randn({depth, 64}, options);
  return relative_error(torch::mm(a.to(torch::kDouble), b.to(torch::kDouble)),
                        torch::mm(a, b).to(torch::kDouble));
}

}  // namespace reprise::testing
