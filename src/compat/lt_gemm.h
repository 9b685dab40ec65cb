#pragma once

#include <ATen/core/Tensor.h>

namespace reprise::compat {

/// out = a b + bias + addend, in one launch of cublasLt.
struct LtProduct {
  at::Tensor a, b;  ///< matrices in float16 or bfloat16
  /// In the type of a and b or in float32, with contiguous rows. Float32 sums are not
  /// rounded in between.
  at::Tensor out;
  at::Tensor bias;  ///< one value per column in the type of `out`, or undefined
  at::Tensor
      addend;  ///< of the shape and type of `out`, perhaps `out` itself, or undefined
};

/// Computes the product with the algorithm that was the fastest when these shapes occurred
/// first in the process: cublasLt's own choice can take 15 % longer. Later calls use the
/// same one, so that a product computed again has the same bits.
///
/// Returns false and does nothing if the product should be left to LibTorch: no CUDA or no
/// cublasLt, small or unaligned operands, shapes that occur first while a CUDA graph is
/// captured, or LibTorch restricted to deterministic algorithms.
/// Tested by tests/compat/lt_gemm_test.cpp.
bool lt_gemm(const LtProduct& product);

/// Whether this build has cublasLt.
bool lt_gemm_built();

/// Allows or forbids these products in this process, since another process may choose other
/// algorithms, with other rounding errors. Allowed by default.
void allow_lt_gemm(bool allowed);

}  // namespace reprise::compat
