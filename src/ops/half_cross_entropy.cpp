#include "ops/half_cross_entropy.h"

#include "compat/gemm.h"
#include "ops/chunks.h"
#include "ops/cuda/cross_entropy.h"
#include "ops/cuda/scaled_sum.h"
#include "ops/kernels.h"

#include <torch/types.h>

#include <limits>

namespace reprise::detail {
namespace {

using torch::Tensor;

// A matrix product whose sizes are not multiples of this is several times slower: the
// remainder is a small product of its own.
constexpr int64_t kGemmAlignment = 128;

/// sum (V, D) = (add ? sum : 0) + scoresᵀ (V', n) · rows (n, D)
void add_class_gradient(Tensor sum, const Tensor& scores, const Tensor& rows,
                        bool add = true) {
  const int64_t aligned = sum.size(0) / kGemmAlignment * kGemmAlignment;
  for (const auto& [first, count] :
       {std::pair(int64_t{0}, aligned),
        std::pair(aligned, sum.size(0) - aligned)}) {
    if (count == 0) continue;
    Tensor part = sum.narrow(0, first, count);
    const Tensor by_class = scores.narrow(1, first, count).t();
    if (add) {
      compat::gemm_add(part, by_class, rows);
    } else {
      compat::gemm_into(part, by_class, rows);
    }
  }
}

/// `bias` (`classes`), or zeros if it is undefined, followed by minus infinity up to
/// `padded`; undefined if neither is needed.
Tensor pad_bias(const Tensor& bias, int64_t classes, int64_t padded,
                const torch::TensorOptions& options) {
  if (!bias.defined() && padded == classes) return {};
  const Tensor whole =
      torch::full({padded}, -std::numeric_limits<double>::infinity(), options);
  Tensor real = whole.narrow(0, 0, classes);
  if (bias.defined()) {
    real.copy_(bias);
  } else {
    real.zero_();
  }
  return whole;
}

kernels::ScoresShape scores_shape(const Tensor& scores, int64_t classes) {
  return {scores.size(0), classes, scores.stride(0), kernel_dtype(scores)};
}

Tensor without_memory(at::IntArrayRef sizes,
                      const torch::TensorOptions& options) {
  return torch::empty({1}, options).expand(sizes);
}

}  // namespace

HalfCrossEntropy::HalfCrossEntropy(const CrossEntropyInputs& inputs,
                                   const CrossEntropySettings& settings)
    : targets_(inputs.targets.contiguous()),
      classes_(inputs.weight.size(0)),
      ignore_index_(settings.ignore_index),
      use_kernels_(kernels_available(inputs.hidden.device())) {
  CrossEntropyInputs without_bias = inputs;
  without_bias.bias = Tensor();
  const ScoreOperands operands(without_bias, settings);
  hidden_ = operands.hidden();
  weight_ = operands.padded_weight();
  rows_per_chunk_ = operands.rows_per_chunk();
  // The kernels do not read the padding.
  if (inputs.bias.defined() || !use_kernels_) {
    bias_ = pad_bias(inputs.bias, classes_, weight_.size(0), weight_.options());
  }
}

Tensor HalfCrossEntropy::scores_of(int64_t first, int64_t count) const {
  const Tensor rows = hidden_.narrow(0, first, count);
  return bias_.defined() ? torch::addmm(bias_, rows, weight_.t())
                         : torch::mm(rows, weight_.t());
}

/// (count, 1): the target's class; 0 if it is ignored.
Tensor HalfCrossEntropy::target_columns(int64_t first, int64_t count) const {
  const Tensor targets = targets_.narrow(0, first, count);
  return targets.masked_fill(targets.eq(ignore_index_), 0).unsqueeze(1);
}

void HalfCrossEntropy::forward_chunk(const Tensor& scores, int64_t first,
                                     int64_t count, Result& result) const {
  const Tensor targets = targets_.narrow(0, first, count);
  const Tensor log_prob = result.state.target_log_prob.narrow(0, first, count);
  if (use_kernels_) {
    kernels::CrossEntropyForward launch;
    launch.shape = scores_shape(scores, classes_);
    launch.scores = scores.data_ptr();
    launch.targets = targets.data_ptr<int64_t>();
    launch.ignore_index = ignore_index_;
    launch.log_sum_exp =
        result.state.log_sum_exp.narrow(0, first, count).data_ptr<float>();
    launch.target_log_prob = log_prob.data_ptr<float>();
    if (result.correct.defined()) {
      launch.correct = result.correct.data_ptr<int64_t>();
    }
    kernels::cross_entropy_forward(launch, kernel_stream(hidden_));
    return;
  }
  if (result.correct.defined()) {
    result.correct += scores.argmax(1).eq(targets).sum();
  }
  const Tensor log_softmax = torch::log_softmax(scores.to(torch::kFloat), 1);
  log_prob.copy_(log_softmax.gather(1, target_columns(first, count)));
}

HalfCrossEntropy::Result HalfCrossEntropy::make_result(
    bool count_correct) const {
  const auto single = hidden_.options().dtype(torch::kFloat);
  Result result;
  result.state.target_log_prob = torch::empty({hidden_.size(0), 1}, single);
  if (use_kernels_) {
    result.state.log_sum_exp = torch::empty({hidden_.size(0)}, single);
  }
  if (count_correct) {
    result.correct = torch::zeros({}, targets_.options().dtype(torch::kLong));
  }
  return result;
}

void HalfCrossEntropy::finish(Result& result) const {
  const Tensor ignored = targets_.eq(ignore_index_).unsqueeze(1);
  result.loss =
      result.state.target_log_prob.masked_fill(ignored, 0).sum().neg();
}

Tensor HalfCrossEntropy::scores_placeholder() const {
  return without_memory({hidden_.size(0), weight_.size(0)}, weight_.options());
}

HalfCrossEntropy::Result HalfCrossEntropy::forward(bool count_correct) const {
  Result result = make_result(count_correct);
  for_each_chunk(hidden_.size(0), rows_per_chunk_,
                 [&](int64_t first, int64_t count) {
                   const Tensor scores = scores_of(first, count);
                   forward_chunk(scores, first, count, result);
                   if (use_kernels_ && count == hidden_.size(0)) {
                     result.state.scores = scores;
                   }
                 });
  finish(result);
  return result;
}

CrossEntropyGradients HalfCrossEntropy::make_unit_gradients(
    const CrossEntropyInputs& inputs, bool allocate) const {
  const auto make = [&](const Tensor& like, torch::ScalarType type) {
    if (!like.defined() || !like.requires_grad()) return Tensor();
    const auto options = hidden_.options().dtype(type).requires_grad(false);
    return allocate ? torch::empty(like.sizes(), options)
                    : without_memory(like.sizes(), options);
  };
  CrossEntropyGradients made;
  made.hidden = make(inputs.hidden, hidden_.scalar_type() == torch::kHalf
                                        ? torch::kFloat
                                        : hidden_.scalar_type());
  made.weight = make(inputs.weight, torch::kFloat);
  made.bias = make(inputs.bias, torch::kFloat);
  return made;
}

Tensor HalfCrossEntropy::gradient_chunk(const Tensor& scores, int64_t first,
                                        int64_t count, Result& result) const {
  const Tensor targets = targets_.narrow(0, first, count);
  if (!use_kernels_ || result.correct.defined()) {
    forward_chunk(scores, first, count, result);
    Tensor values = backward_chunk(scores, first, count, result.state);
    // The kernels write zeros themselves.
    return use_kernels_
               ? values
               : values.masked_fill_(targets.eq(ignore_index_).unsqueeze(1), 0);
  }
  const ForwardState& state = result.state;
  kernels::CrossEntropyGradient launch;
  launch.shape = scores_shape(scores, classes_);
  launch.scores = scores.data_ptr();
  launch.targets = targets.data_ptr<int64_t>();
  launch.ignore_index = ignore_index_;
  launch.log_sum_exp =
      state.log_sum_exp.narrow(0, first, count).data_ptr<float>();
  launch.target_log_prob =
      state.target_log_prob.narrow(0, first, count).data_ptr<float>();
  kernels::cross_entropy_gradient(launch, kernel_stream(hidden_));
  return scores;
}

void HalfCrossEntropy::add_unit_gradients(
    const Tensor& values, int64_t first, int64_t count,
    CrossEntropyGradients& gradients) const {
  if (gradients.hidden.defined()) {
    Tensor rows = gradients.hidden.narrow(0, first, count);
    compat::gemm_into(rows, values, weight_);
  }
  if (gradients.weight.defined()) {
    add_class_gradient(gradients.weight, values,
                       hidden_.narrow(0, first, count), /*add=*/first > 0);
  }
  if (gradients.bias.defined()) {
    if (first == 0) gradients.bias.zero_();
    const Tensor ones = torch::ones({count, 1}, values.options());
    gradients.bias.add_(compat::gemm_as(values.t(), ones, torch::kFloat)
                            .squeeze(1)
                            .narrow(0, 0, classes_));
  }
}

HalfCrossEntropy::Result HalfCrossEntropy::forward_with_gradients(
    bool count_correct, CrossEntropyGradients& gradients) const {
  Result result = make_result(count_correct);
  for_each_chunk(
      hidden_.size(0), rows_per_chunk_, [&](int64_t first, int64_t count) {
        const Tensor values =
            gradient_chunk(scores_of(first, count), first, count, result);
        add_unit_gradients(values, first, count, gradients);
      });
  finish(result);
  return result;
}

Tensor HalfCrossEntropy::backward_chunk(const Tensor& scores, int64_t first,
                                        int64_t count,
                                        const ForwardState& state) const {
  const Tensor log_prob = state.target_log_prob.narrow(0, first, count);
  if (state.log_sum_exp.defined()) {
    kernels::CrossEntropyBackward launch;
    launch.shape = scores_shape(scores, classes_);
    launch.scores = scores.data_ptr();
    launch.targets = targets_.narrow(0, first, count).data_ptr<int64_t>();
    launch.ignore_index = ignore_index_;
    launch.log_sum_exp =
        state.log_sum_exp.narrow(0, first, count).data_ptr<float>();
    launch.target_log_prob = log_prob.data_ptr<float>();
    kernels::cross_entropy_backward(launch, kernel_stream(hidden_));
    return scores;
  }
  const Tensor softmax = torch::softmax(scores, 1);
  softmax.scatter_(1, target_columns(first, count),
                   log_prob.expm1().to(softmax.scalar_type()));
  return softmax;
}

void HalfCrossEntropy::backward(const Tensor& loss_gradient,
                                const ForwardState& state,
                                CrossEntropyGradients& gradients) const {
  const auto type = hidden_.scalar_type();
  const Tensor factors =
      loss_gradient.to(torch::kFloat)
          .expand({hidden_.size(0), 1})
          .masked_fill(targets_.eq(ignore_index_).unsqueeze(1), 0);
  const Tensor scaled = (hidden_ * factors).to(type);
  for_each_chunk(
      hidden_.size(0), rows_per_chunk_, [&](int64_t first, int64_t count) {
        const Tensor values = backward_chunk(
            state.scores.defined() ? state.scores : scores_of(first, count),
            first, count, state);
        const Tensor factor = factors.narrow(0, first, count);
        if (gradients.hidden.defined()) {
          gradients.hidden.narrow(0, first, count)
              .copy_(
                  compat::gemm_as(values, weight_, torch::kFloat).mul_(factor));
        }
        if (gradients.weight.defined()) {
          add_class_gradient(gradients.weight, values,
                             scaled.narrow(0, first, count));
        }
        if (gradients.bias.defined()) {
          gradients.bias.add_(
              compat::gemm_as(values.t(), factor.to(type), torch::kFloat)
                  .squeeze(1)
                  .narrow(0, 0, classes_));
        }
      });
}

void scaled_sum(Tensor& sums, const Tensor& values, const Tensor& factor,
                bool add) {
  if (kernels_available(sums.device()) && sums.is_contiguous() &&
      values.is_contiguous()) {
    kernels::ScaledSum launch;
    launch.count = sums.numel();
    launch.factor = factor.data_ptr<float>();
    launch.values = values.data_ptr();
    launch.values_type = kernel_dtype(values);
    launch.sums = sums.data_ptr();
    launch.sums_type = kernel_dtype(sums);
    launch.add = add;
    kernels::scaled_sum(launch, kernel_stream(sums));
    return;
  }
  const bool single = is_float32(sums) && is_float32(values);
  if (single && add) {
    sums.addcmul_(values, factor);
    return;
  }
  if (single && sums.is_same(values)) {
    sums.mul_(factor);
    return;
  }
  // Not in place in half precision, which would round the factor.
  const Tensor scaled = values.to(torch::kFloat) * factor;
  if (add) {
    sums.add_(scaled);
  } else {
    sums.copy_(scaled);
  }
}

}  // namespace reprise::detail
