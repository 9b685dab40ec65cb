#pragma once

#include "kernel.h"

#include <cstdint>
#include <limits>

/// CUDA kernel for float32 matrix products on the tensor cores of compute capability 9.0.
/// ops/tf32x3_gemm.h describes the method. No atomics: results are reproducible bit for
/// bit. Tested by tests/ops/tf32x3_gemm_test.cpp.
namespace reprise::detail::kernels {

/// c (m, n) = a (m, k) b (k, n) + bias, added to the previous c if `add` is set.
struct Tf32x3Gemm {
  const float* a = nullptr;
  const float* b = nullptr;
  float* c = nullptr;
  const float* bias = nullptr;  ///< (n), added to each row; may be null
  bool add = false;
  int64_t m = 0, n = 0, k = 0;
  /// Whether a (b) is contiguous along k; otherwise along m (n). `c` is contiguous
  /// along n.
  bool a_k_contiguous = true, b_k_contiguous = true;
  /// Leading dimensions: elements from one contiguous line to the next.
  int64_t lda = 0, ldb = 0, ldc = 0;
  int device = 0;  ///< of the tensors; must be the current device

  /// Whether sizes, strides and addresses are multiples of 16 bytes and within the
  /// kernel's limits.
  bool supported() const {
    constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
    return k % 4 == 0 && m % 4 == 0 && n % 4 == 0 && aligned(a, lda) &&
           aligned(b, ldb) && aligned(c, ldc) &&
           (a_k_contiguous ? m : k) * lda <= kMax &&
           (b_k_contiguous ? n : k) * ldb <= kMax;
  }

 private:
  static bool aligned(const float* pointer, int64_t leading_dimension) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 &&
           leading_dimension % 4 == 0;
  }
};

/// Compute capability that the kernel is compiled for.
constexpr int kTf32x3ComputeCapability = 90;

REPRISE_KERNEL(tf32x3_gemm, Tf32x3Gemm);

}  // namespace reprise::detail::kernels
