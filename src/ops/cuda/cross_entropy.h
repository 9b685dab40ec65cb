#pragma once

#include "values.h"

#include <cstdint>

/// CUDA kernels behind linear_cross_entropy() in half precision: one pass over the scores
/// each way, in the forward nothing written but a value or two a row. Nothing is atomic
/// but a count: the same input gives the same bits.
namespace reprise::kernels {

/// Rows of scores as a product leaves them.
struct ScoresShape {
  int64_t rows = 0;
  int64_t columns = 0;  ///< that are classes
  int64_t stride = 0;   ///< from row to row, a multiple of 8
  Values values = Values::kBfloat16;
};

/// Whether this build has the kernels.
bool cross_entropy_kernels_built();

/// Fills for each row `log_total`, the logarithm of the sum of its exponentials, and
/// `picked`, the logarithm of the softmax at its target (at class 0 where that is
/// `ignored`). `right`, unless null, is raised by the rows whose target is the largest
/// score, the first of equal ones. `stream`: a cudaStream_t.
void cross_entropy_forward(const ScoresShape& shape, const void* scores,
                           const int64_t* targets, int64_t ignored,
                           float* log_total, float* picked, int64_t* right,
                           void* stream);

/// Writes the softmax over the scores, less one at the target; zero beside the classes.
void cross_entropy_backward(const ScoresShape& shape, void* scores,
                            const int64_t* targets, int64_t ignored,
                            const float* log_total, const float* picked,
                            void* stream);

}  // namespace reprise::kernels
