#pragma once

#include "values.h"

#include <cstdint>

/// A CUDA kernel that adds up the rows of a matrix, as the gradient of a bias is. Nothing
/// is atomic: the same input gives the same bits.
namespace reprise::kernels {

struct MatrixShape {
  int64_t rows = 0;
  int64_t columns = 0;  ///< a multiple of 8
  Values values = Values::kBfloat16;

  /// Into how many parts the rows are cut.
  int64_t parts() const;
  /// Values of scratch memory.
  int64_t scratch() const { return parts() * columns; }
};

/// Whether this build has the kernel.
bool column_sums_kernel_built();

/// sums = (add ? sums : 0) + the sum of the rows. `stream`: a cudaStream_t.
void column_sums(const MatrixShape& shape, const void* matrix, float* scratch,
                 float* sums, bool add, void* stream);

}  // namespace reprise::kernels
