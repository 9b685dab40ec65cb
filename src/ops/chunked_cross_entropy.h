#pragma once

#include <reprise/ops/loss.h>

#include <torch/types.h>

#include <cstdint>

/// ops::linear_cross_entropy() with LibTorch's operators, some rows or columns of the
/// scores at a time. Tested by tests/ops/loss_test.cpp.
namespace reprise::detail {

struct CrossEntropyInputs {
  torch::Tensor hidden;  ///< (N, D)
  torch::Tensor weight;  ///< (V, D)
  torch::Tensor
      weight_copy;     ///< padded, from WeightCopies::find(); may be undefined
  torch::Tensor bias;  ///< (V), or undefined
  torch::Tensor targets;  ///< (N) int64
};

struct CrossEntropySettings {
  int64_t chunk_scores = 0;
  int64_t ignore_index = -100;
  bool by_columns = false;
  torch::ScalarType gemm_type = torch::kFloat;  ///< of the matrix products
  torch::ScalarType loss_type = torch::kFloat;
  bool gradients_in_forward = false;  ///< with HalfCrossEntropy only
};

/// Gradients to compute; undefined ones are not needed.
struct CrossEntropyGradients {
  torch::Tensor hidden;  ///< overwritten
  torch::Tensor weight;  ///< by rows: added to; by columns: overwritten
  torch::Tensor bias;    ///< added to
  bool weight_is_zero = false;
};

/// Operands of the scores, hidden · weightᵀ + bias, in the type of the matrix products.
///
/// In half precision, classes are padded to a multiple of 128: tensor cores need rows of
/// scores to begin at multiples of 16 bytes, which a vocabulary of 50257 does not give.
class ScoreOperands {
 public:
  ScoreOperands(const CrossEntropyInputs& inputs,
                const CrossEntropySettings& settings);

  const torch::Tensor& hidden() const { return hidden_; }
  /// With rows of zeros for the padding.
  const torch::Tensor& padded_weight() const { return weight_; }
  int64_t rows() const { return hidden_.size(0); }
  int64_t columns() const { return columns_; }
  int64_t rows_per_chunk() const;
  int64_t columns_per_chunk() const;
  torch::Tensor targets(int64_t first, int64_t count) const {
    return targets_.narrow(0, first, count);
  }
  /// (N) bool
  torch::Tensor ignored() const { return targets_.eq(settings_.ignore_index); }

  /// Scores of some rows (count, V), or of some columns (N, count).
  torch::Tensor scores_of_rows(int64_t first, int64_t count) const;
  torch::Tensor scores_of_columns(int64_t first, int64_t count) const;

  /// The gradient of rows of scores in the type of the matrix products, with columns of
  /// zeros for the padding.
  torch::Tensor pad_gradient(const torch::Tensor& gradient) const {
    return pad(gradient, 1);
  }

 private:
  torch::Tensor pad(const torch::Tensor& tensor, int64_t dim) const;

  CrossEntropySettings settings_;
  int64_t columns_, padding_;
  torch::Tensor hidden_, weight_, bias_, targets_;
};

ops::LinearCrossEntropyResult chunked_cross_entropy_forward(
    const CrossEntropyInputs& inputs, const CrossEntropySettings& settings,
    bool count_correct);

void chunked_cross_entropy_backward(const CrossEntropyInputs& inputs,
                                    const CrossEntropySettings& settings,
                                    const torch::Tensor& loss_gradient,
                                    CrossEntropyGradients& gradients);

}  // namespace reprise::detail
