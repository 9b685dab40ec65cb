#pragma once

#include "values.h"

#include <cstdint>

/// CUDA kernels behind lean_add_norm(): a sum, the norm of its rows and the change of
/// precision in one pass, and their gradients in another. Nothing is atomic: the same
/// input gives the same bits.
namespace reprise::kernels {

struct RowsShape {
  int64_t rows = 0;
  int64_t columns = 0;              ///< a multiple of 4, at most kMostColumns
  Values branch = Values::kNone;    ///< of what is added, if anything is
  Values result = Values::kSingle;  ///< of the normalised rows

  static constexpr int64_t kMostColumns = 4096;
  /// Into how many parts the rows are cut for the gradients of weight and bias.
  int64_t parts() const;
  /// Values of scratch memory, in the backward.
  int64_t scratch() const { return 2 * parts() * columns; }
};

/// Whether this build has the kernels.
bool add_norm_kernels_built();

/// Fills `sum` = x + branch (unless null, then x itself is normalised), `result`, and for
/// each row `mean` and `inverse_deviation`. `stream`: a cudaStream_t.
void add_norm_forward(const RowsShape& shape, const float* x,
                      const void* branch, const float* weight,
                      const float* bias, double epsilon, float* sum,
                      void* result, float* mean, float* inverse_deviation,
                      void* stream);

/// `sum` is what was normalised, `dsum` its gradient from elsewhere or null. Fills `dx`,
/// which is also the gradient of the branch; where that is in half precision, `dbranch`
/// too. Then the gradients of weight and bias.
void add_norm_backward(const RowsShape& shape, const float* sum,
                       const void* dresult, const float* dsum,
                       const float* weight, const float* mean,
                       const float* inverse_deviation, float* scratch,
                       float* dx, void* dbranch, float* dweight, float* dbias,
                       void* stream);

}  // namespace reprise::kernels
