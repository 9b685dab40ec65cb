#pragma once

#include "dtype.h"
#include "kernel.h"

#include <algorithm>
#include <cstdint>

/// CUDA kernels of ops::norm_act() and ops::conv_relu() for channels-last images: a matrix
/// of N·H·W rows and C columns. This file: statistics of a norm, and the sums over rows
/// that its gradient needs. Several blocks share a column and write partial results, which
/// a second kernel merges in double precision in a fixed order. No atomics: results are
/// reproducible bit for bit. Tested by tests/ops/norm_act_test.cpp.
namespace reprise::detail::kernels {

struct RowsShape {
  int64_t samples = 0, channels = 0, height = 0, width = 0;
  /// Groups of channels, each normalized per sample (GroupNorm). 0: each channel is
  /// normalized over all samples (BatchNorm).
  int64_t groups = 0;
  DType type = DType::kFloat32;
  bool pooled = false;  ///< a max pool follows; its kernels need more registers

  static constexpr int64_t kThreads = 256;  ///< per block

  /// Elements per memory access of 16 bytes. Must divide the number of channels.
  int64_t vector_size() const { return type == DType::kFloat32 ? 4 : 8; }
  int64_t vectors() const { return channels / vector_size(); }
  /// Blocks side by side: a block reads at most 512 bytes of a row.
  int64_t column_blocks() const { return (vectors() + 31) / 32; }
  int64_t vectors_of_block() const {
    return (vectors() + column_blocks() - 1) / column_blocks();
  }
  int64_t rows_of_block() const { return kThreads / vectors_of_block(); }
  /// Parts of the matrix that are normalized separately.
  int64_t instances() const { return groups == 0 ? 1 : samples; }
  int64_t rows() const { return samples * height * width; }
  int64_t rows_of_instance() const { return rows() / instances(); }
  /// Number of means, and of variances.
  int64_t statistics() const {
    return groups == 0 ? channels : samples * groups;
  }
  /// Blocks that share the rows of an instance if `blocks` can run at a time.
  int64_t parts(int64_t blocks) const {
    const int64_t most =
        (rows_of_instance() + 4 * rows_of_block() - 1) / (4 * rows_of_block());
    return std::clamp<int64_t>(blocks / (instances() * column_blocks()), 1,
                               most);
  }
  /// The same for the kernels that write partial results.
  int64_t moment_parts() const { return parts(528); }
  int64_t sum_parts() const { return parts(pooled ? 264 : 396); }
  /// Number of floats of scratch memory, for the forward and for the backward.
  int64_t scratch_size() const {
    return 2 * instances() * std::max(moment_parts(), sum_parts()) * channels;
  }
};

/// Running statistics of a BatchNorm, (channels) each; null if they are not tracked.
struct RunningMoments {
  float* mean = nullptr;
  float* variance = nullptr;
  double momentum = 0;
};

/// Mean and 1 / √(variance + epsilon) of x.
struct NormStatistics {
  RowsShape shape{};
  const void* x = nullptr;
  double epsilon = 0;
  float* scratch = nullptr;  ///< shape.scratch_size() floats
  // Outputs.
  float* mean = nullptr;               ///< (shape.statistics())
  float* inverse_deviation = nullptr;  ///< (shape.statistics())
  RunningMoments running{};            ///< updated
};
REPRISE_KERNEL(norm_statistics, NormStatistics);

/// Merges partial sums of the gradient g of a norm's output, and of g · (x − mean).
struct NormSums {
  RowsShape shape{};
  const float* scratch = nullptr;  ///< partial sums, shape.sum_parts()
  const float* weight = nullptr;   ///< (channels)
  const float* inverse_deviation = nullptr;  ///< null: no norm, only `dbias`
  // Outputs.
  /// (shape.statistics(), 2): factor of x − mean in the gradient of x, and the constant.
  float* coefficients = nullptr;
  float* dweight = nullptr;  ///< (channels)
  float* dbias = nullptr;    ///< (channels)
};
REPRISE_KERNEL(norm_sums, NormSums);

}  // namespace reprise::detail::kernels
