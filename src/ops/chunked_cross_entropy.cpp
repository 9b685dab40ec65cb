#include "ops/chunked_cross_entropy.h"

#include "compat/gemm.h"
#include "ops/chunks.h"

#include <torch/types.h>

#include <algorithm>

namespace reprise::detail {
namespace {

using torch::Tensor;

constexpr int64_t kReduceSum = at::Reduction::Sum;
constexpr int64_t kColumnAlignment = 128;

int64_t column_padding(int64_t columns, torch::ScalarType type) {
  if (c10::elementSize(type) != 2) return 0;
  return (kColumnAlignment - columns % kColumnAlignment) % kColumnAlignment;
}

Tensor multiply_add(const Tensor& hidden, const Tensor& weight,
                    const Tensor& bias) {
  return bias.defined() ? torch::addmm(bias, hidden, weight.t())
                        : torch::mm(hidden, weight.t());
}

class ChunkedBackward {
 public:
  ChunkedBackward(const ScoreOperands& operands,
                  const CrossEntropySettings& settings, Tensor loss_gradient,
                  CrossEntropyGradients& gradients)
      : operands_(operands),
        settings_(settings),
        loss_gradient_(std::move(loss_gradient)),
        gradients_(gradients) {}

  void run() {
    const bool columns = settings_.by_columns && gradients_.weight.defined();
    if (columns) {
      const auto type = loss_gradient_.options();
      max_score_ = torch::empty({operands_.rows(), 1}, type);
      log_sum_ = torch::empty_like(max_score_);
    }
    for_each_chunk(
        operands_.rows(), operands_.rows_per_chunk(),
        [&](int64_t first, int64_t count) { add_rows(first, count); });
    if (!columns) return;
    prepare_columns();
    for_each_chunk(
        operands_.columns(), operands_.columns_per_chunk(),
        [&](int64_t first, int64_t count) { add_columns(first, count); });
  }

 private:
  void add_rows(int64_t first, int64_t count) {
    const Tensor targets = operands_.targets(first, count);
    Tensor gradient = score_gradient(first, count, targets);
    if (gradients_.bias.defined()) gradients_.bias.add_(gradient.sum(0));
    gradient = operands_.pad_gradient(gradient);
    if (gradients_.hidden.defined()) {
      gradients_.hidden.narrow(0, first, count)
          .copy_(torch::mm(gradient, operands_.padded_weight()));
    }
    Tensor& weight = gradients_.weight;
    if (!weight.defined() || settings_.by_columns) return;
    const Tensor by_class = gradient.narrow(1, 0, operands_.columns()).t();
    const Tensor rows = operands_.hidden().narrow(0, first, count);
    if (first == 0 && gradients_.weight_is_zero &&
        weight.scalar_type() == rows.scalar_type()) {
      // In some libraries a product added to zeros differs from the product in its last
      // bits.
      torch::mm_out(weight, by_class, rows);
    } else {
      compat::gemm_add(weight, by_class, rows);
    }
  }

  /// Gradient of some rows of scores.
  Tensor score_gradient(int64_t first, int64_t count, const Tensor& targets) {
    Tensor values =
        operands_.scores_of_rows(first, count).to(settings_.loss_type);
    if (max_score_.defined()) {
      max_score_.narrow(0, first, count).copy_(values.amax(1, true));
    }
    values = torch::log_softmax(values, 1);
    if (max_score_.defined()) {
      // The largest score has difference 0 from itself.
      log_sum_.narrow(0, first, count).copy_(values.amax(1, true).neg_());
    }
    const Tensor total_weight = torch::zeros({}, values.options());
    const Tensor gradient = torch::nll_loss_backward(
        loss_gradient_, values, targets, {}, kReduceSum, settings_.ignore_index,
        total_weight);
    return torch::_log_softmax_backward_data(gradient, values, 1,
                                             settings_.loss_type);
  }

  void prepare_columns() {
    const Tensor ignored = operands_.ignored().unsqueeze(1);
    targets_ = operands_.targets(0, operands_.rows())
                   .unsqueeze(1)
                   .masked_fill(ignored, -1);
    target_gradient_ = loss_gradient_.neg()
                           .expand({operands_.rows(), 1})
                           .masked_fill(ignored, 0);
  }

  /// Uses the operator that add_rows() uses, on the same values, since libraries have more
  /// than one implementation of the exponential. One extra column stands for targets
  /// outside of the chunk.
  void add_columns(int64_t first, int64_t count) {
    Tensor values;  // log-softmax
    {
      const Tensor scores =
          operands_.scores_of_columns(first, count).to(settings_.loss_type);
      values = torch::empty({operands_.rows(), count + 1}, scores.options());
      Tensor here = values.narrow(1, 0, count);
      torch::sub_out(here, scores, max_score_);
      here.sub_(log_sum_);
      values.select(1, count).zero_();
    }
    const Tensor outside =
        targets_.lt(first).logical_or_(targets_.ge(first + count));
    const Tensor position = (targets_ - first).masked_fill_(outside, count);
    Tensor gradient =
        torch::zeros_like(values).scatter_(1, position, target_gradient_);
    gradient = torch::_log_softmax_backward_data(gradient, values, 1,
                                                 settings_.loss_type);
    values.reset();
    gradient =
        gradient.narrow(1, 0, count).to(settings_.gemm_type).contiguous();
    gradients_.weight.narrow(0, first, count)
        .copy_(torch::mm(gradient.t(), operands_.hidden()));
  }

  const ScoreOperands& operands_;
  CrossEntropySettings settings_;
  Tensor loss_gradient_;
  CrossEntropyGradients& gradients_;
  // (N, 1) each, for columns: the largest score of the row, the logarithm of the sum of
  // exponentials relative to it, the target, and the gradient of its log-softmax.
  Tensor max_score_, log_sum_;
  Tensor targets_, target_gradient_;
};

}  // namespace

ScoreOperands::ScoreOperands(const CrossEntropyInputs& inputs,
                             const CrossEntropySettings& settings)
    : settings_(settings),
      columns_(inputs.weight.size(0)),
      padding_(column_padding(columns_, settings.gemm_type)),
      hidden_(inputs.hidden.to(settings.gemm_type)),
      weight_(inputs.weight_copy.defined() ? inputs.weight_copy
                                           : pad(inputs.weight, 0)),
      bias_(inputs.bias.defined() ? pad(inputs.bias, 0) : inputs.bias),
      targets_(inputs.targets) {}

int64_t ScoreOperands::rows_per_chunk() const {
  return settings_.chunk_scores / std::max<int64_t>(columns(), 1);
}

int64_t ScoreOperands::columns_per_chunk() const {
  return settings_.chunk_scores / std::max<int64_t>(rows(), 1);
}

Tensor ScoreOperands::scores_of_rows(int64_t first, int64_t count) const {
  return multiply_add(hidden_.narrow(0, first, count), weight_, bias_)
      .narrow(1, 0, columns_);
}

Tensor ScoreOperands::scores_of_columns(int64_t first, int64_t count) const {
  return multiply_add(
      hidden_, weight_.narrow(0, first, count),
      bias_.defined() ? bias_.narrow(0, first, count) : Tensor());
}

Tensor ScoreOperands::pad(const Tensor& tensor, int64_t dim) const {
  if (padding_ == 0) return tensor.to(settings_.gemm_type);
  auto sizes = tensor.sizes().vec();
  sizes[static_cast<size_t>(dim)] = padding_ + columns_;
  const Tensor padded =
      torch::empty(sizes, tensor.options().dtype(settings_.gemm_type));
  padded.narrow(dim, 0, columns_).copy_(tensor);
  padded.narrow(dim, columns_, padding_).zero_();
  return padded;
}

ops::LinearCrossEntropyResult chunked_cross_entropy_forward(
    const CrossEntropyInputs& inputs, const CrossEntropySettings& settings,
    bool count_correct) {
  const ScoreOperands operands(inputs, settings);
  const auto type = operands.hidden()
                        .options()
                        .dtype(settings.loss_type)
                        .requires_grad(false);
  // Log-softmax of the target's class, as one column: its loss adds up in the same order
  // as that of all columns.
  const Tensor target_log_prob = torch::empty({operands.rows(), 1}, type);
  const Tensor ignored = operands.ignored();
  ops::LinearCrossEntropyResult result;
  if (count_correct) {
    result.correct = torch::zeros({}, type.dtype(torch::kLong));
  }
  for_each_chunk(operands.rows(), operands.rows_per_chunk(),
                 [&](int64_t first, int64_t count) {
                   Tensor values = operands.scores_of_rows(first, count);
                   const Tensor targets = operands.targets(first, count);
                   if (count_correct) {
                     result.correct += values.argmax(1).eq(targets).sum();
                   }
                   values = values.to(settings.loss_type);
                   values = torch::log_softmax(values, 1);
                   const Tensor classes =
                       targets.masked_fill(ignored.narrow(0, first, count), 0)
                           .unsqueeze(1);
                   target_log_prob.narrow(0, first, count)
                       .copy_(values.gather(1, classes));
                 });
  const Tensor first_column = torch::zeros_like(ignored, torch::kLong)
                                  .masked_fill_(ignored, settings.ignore_index);
  result.loss = torch::nll_loss(target_log_prob, first_column, {}, kReduceSum,
                                settings.ignore_index);
  return result;
}

void chunked_cross_entropy_backward(const CrossEntropyInputs& inputs,
                                    const CrossEntropySettings& settings,
                                    const Tensor& loss_gradient,
                                    CrossEntropyGradients& gradients) {
  const ScoreOperands operands(inputs, settings);
  ChunkedBackward(operands, settings, loss_gradient, gradients).run();
}

}  // namespace reprise::detail
