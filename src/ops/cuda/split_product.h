#pragma once

#include <cstdint>

/// A CUDA kernel for products of single precision on the tensor cores of compute
/// capability 9.0. See split_products.h for the method. Nothing is atomic: the same
/// input gives the same bits.
namespace reprise::kernels {

/// c (m, n) = a (m, k) b (k, n), plus what is named.
struct SplitProduct {
  const float* a = nullptr;
  const float* b = nullptr;
  float* c = nullptr;
  const float* bias = nullptr;  ///< (n), added to each row; or none
  bool add = false;             ///< to what c holds
  int64_t m = 0, n = 0, k = 0;
  /// Whether k is the direction in which a, or b, is contiguous; the other if not.
  /// `c` is contiguous along n.
  bool a_along = true, b_along = true;
  int64_t lda = 0, ldb = 0, ldc = 0;  ///< values from one line to the next

  /// What the kernel asks of sizes, strides and addresses: of whole chunks of 16 bytes.
  bool fits() const;
};

/// Whether this build has the kernel, and the device can run it.
bool split_product_runs(int device);

/// `stream`: a cudaStream_t of `device`, which is the current one.
void split_product(const SplitProduct& product, int device, void* stream);

}  // namespace reprise::kernels
