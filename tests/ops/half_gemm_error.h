#pragma once

#include "support.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>

namespace reprise::testing {

/// Relative error of LibTorch's bfloat16 matrix product with inner dimension `depth`. About
/// 2e-3 if it accumulates in float32. LibTorch 1.13 accumulates in bfloat16 on processors for
/// which oneDNN has no such product; no operator can be more accurate there.
inline double half_gemm_error(int64_t depth) {
  const torch::NoGradGuard no_grad;
  const auto options = torch::TensorOptions(device()).dtype(torch::kBFloat16);
  const auto a = torch::randn({64, depth}, options);
  const auto b = torch::randn({depth, 64}, options);
  return relative_error(torch::mm(a.to(torch::kDouble), b.to(torch::kDouble)),
                        torch::mm(a, b).to(torch::kDouble));
}

}  // namespace reprise::testing
