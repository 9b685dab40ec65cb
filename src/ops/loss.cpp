#include "compat/autocast.h"
#include "compat/gemm.h"
#include "compat/saved_tensors.h"
#include "ops/chunked_cross_entropy.h"
#include "ops/chunks.h"
#include "ops/function.h"
#include "ops/half_cross_entropy.h"
#include "ops/kernels.h"
#include "ops/linear_gradients.h"

#include <reprise/ops/loss.h>
#include <reprise/ops/weight_copies.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/functional/loss.h>
#include <torch/types.h>

#include <algorithm>

namespace reprise::ops {
namespace {

using detail::CrossEntropyGradients;
using detail::CrossEntropyInputs;
using detail::CrossEntropySettings;
using detail::HalfCrossEntropy;
using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kChunkScoresCpu = int64_t{1} << 22;
constexpr int64_t kChunkScoresCuda = int64_t{1} << 24;
// Kernels need no copies of the scores. Each chunk passes over the whole weight and its
// gradient, so there are only a few chunks however many rows there are.
constexpr int64_t kChunkScoresKernels = int64_t{1} << 26;
constexpr int64_t kMaxChunksKernels = 8;
// With gradients in the forward. The product that adds to the gradient of the weight reads
// and writes 8 bytes per weight for 2 operations per weight and row. At 700 · 10¹²
// operations/s and 4 · 10¹² bytes/s, this takes as long as the operations for 700 rows, and
// a sixth of them for 4,096, whatever the sizes of weight and vocabulary.
constexpr int64_t kChunkRows = 4096;
constexpr int64_t kMaxChunkScores = int64_t{1} << 29;  // 1 GiB

/// Whether HalfCrossEntropy supports the settings.
bool uses_half(const CrossEntropySettings& settings) {
  return c10::elementSize(settings.gemm_type) == 2 && !settings.by_columns &&
         settings.loss_type == torch::kFloat;
}

void save_settings(AutogradContext& context,
                   const CrossEntropySettings& settings) {
  auto& data = context.saved_data;
  data["chunk_scores"] = settings.chunk_scores;
  data["ignore_index"] = settings.ignore_index;
  data["by_columns"] = settings.by_columns;
  data["gemm_type"] = static_cast<int64_t>(settings.gemm_type);
  data["loss_type"] = static_cast<int64_t>(settings.loss_type);
  data["gradients_in_forward"] = settings.gradients_in_forward;
}

CrossEntropySettings saved_settings(AutogradContext& context) {
  auto& data = context.saved_data;
  const auto type = [&](const char* name) {
    return static_cast<torch::ScalarType>(data[name].toInt());
  };
  return {data["chunk_scores"].toInt(),
          data["ignore_index"].toInt(),
          data["by_columns"].toBool(),
          type("gemm_type"),
          type("loss_type"),
          data["gradients_in_forward"].toBool()};
}

/// Order of the saved tensors. From kLogProb on: in half precision only.
enum Saved : size_t {
  kHidden,
  kWeight,
  kBias,
  kTargets,
  kLogProb,
  kLogSumExp,
  kScores,
  kUnitHidden,
  kUnitWeight,
  kUnitBias,
};

class LinearCrossEntropyOperator
    : public torch::autograd::Function<LinearCrossEntropyOperator> {
 public:
  /// `bias` and `copy`: empty if there is none.
  static variable_list forward(AutogradContext* context, const Tensor& hidden,
                               const Tensor& weight, const Tensor& bias,
                               const Tensor& targets, const Tensor& copy,
                               const CrossEntropySettings& settings,
                               bool count_correct) {
    const compat::AutocastGuard no_autocast(compat::AutocastState{});
    save_settings(*context, settings);
    if (copy.numel() > 0) {
      // As in linear().
      if (!WeightCopies::converts_per_use(weight, settings.gemm_type)) {
        context->saved_data["copy"] = copy;
      }
      context->saved_data["weight"] = weight;
    }
    const CrossEntropyInputs inputs{hidden, weight,
                                    detail::undefined_if_empty(copy),
                                    detail::undefined_if_empty(bias), targets};
    LinearCrossEntropyResult result;
    if (uses_half(settings)) {
      result = forward_half(*context, inputs, settings, count_correct);
    } else {
      context->save_for_backward({hidden, weight, bias, targets});
      result = detail::chunked_cross_entropy_forward(inputs, settings,
                                                     count_correct);
    }
    if (!count_correct) return {result.loss};
    context->mark_non_differentiable({result.correct});
    return {result.loss, result.correct};
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    detail::check_first_order("linear_cross_entropy",
                              "torch::nn::functional::cross_entropy");
    const compat::AutocastGuard no_autocast(compat::AutocastState{});
    const auto saved = context->get_saved_variables();
    const Tensor &hidden = saved[kHidden], &weight = saved[kWeight];
    const Tensor bias = detail::undefined_if_empty(saved[kBias]);
    const CrossEntropySettings settings = saved_settings(*context);
    auto& data = context->saved_data;
    // Scores and gradients of the forward are overwritten: a second backward computes them
    // again.
    const bool first_use = data.count("used") == 0;
    data["used"] = true;
    if (settings.gradients_in_forward && first_use) {
      return scale_gradients(*context, saved, gradients[0].to(torch::kFloat));
    }
    const bool has_copy = data.count("weight") > 0;
    const CrossEntropyInputs inputs{hidden, weight,
                                    saved_weight_copy(*context, settings), bias,
                                    saved[kTargets]};
    const bool adds_directly = has_copy && !settings.by_columns;
    CrossEntropyGradients sums;
    sums.weight_is_zero = !adds_directly;
    if (context->needs_input_grad(0)) sums.hidden = torch::empty_like(hidden);
    if (context->needs_input_grad(1)) {
      sums.weight = adds_directly ? gradient_of(data["weight"].toTensor())
                                  : zero_sum_like(weight);
    }
    if (bias.defined() && context->needs_input_grad(2)) {
      sums.bias = zero_sum_like(bias);
    }
    if (uses_half(settings)) {
      HalfCrossEntropy::ForwardState state{
          saved[kLogProb], detail::undefined_if_empty(saved[kLogSumExp]), {}};
      if (first_use) state.scores = detail::undefined_if_empty(saved[kScores]);
      HalfCrossEntropy(inputs, settings).backward(gradients[0], state, sums);
    } else {
      detail::chunked_cross_entropy_backward(inputs, settings, gradients[0],
                                             sums);
    }
    return {sums.hidden,
            adds_directly ? Tensor() : to_type_of(sums.weight, weight),
            to_type_of(sums.bias, bias),
            {},
            {},
            {},
            {}};
  }

 private:
  /// Saves, in addition to the arguments, what a recomputation of the scores would need, and
  /// the scores or gradients if they are known. If saved tensors are dropped, gradients are
  /// not computed, and tensors without memory stand for them.
  static LinearCrossEntropyResult forward_half(
      AutogradContext& context, const CrossEntropyInputs& inputs,
      const CrossEntropySettings& settings, bool count_correct) {
    const HalfCrossEntropy loss(inputs, settings);
    const bool keeps = compat::SavedTensorScope::keeps();
    CrossEntropyGradients unit;
    if (settings.gradients_in_forward) {
      unit = loss.make_unit_gradients(inputs, /*allocate=*/keeps);
    }
    auto result = settings.gradients_in_forward && keeps
                      ? loss.forward_with_gradients(count_correct, unit)
                      : loss.forward(count_correct);
    Tensor& scores = result.state.scores;
    if (settings.gradients_in_forward) {
      scores.reset();
    } else if (scores.defined() && !keeps) {
      scores = loss.scores_placeholder();
    }
    const auto or_empty = [&](const Tensor& tensor) {
      return detail::defined_or_empty(tensor, inputs.hidden);
    };
    context.save_for_backward(
        {inputs.hidden, inputs.weight, or_empty(inputs.bias), inputs.targets,
         result.state.target_log_prob, or_empty(result.state.log_sum_exp),
         or_empty(scores), or_empty(unit.hidden), or_empty(unit.weight),
         or_empty(unit.bias)});
    return {result.loss, result.correct};
  }

  /// Multiplies the gradients that the forward computed by `factor`, the gradient of the
  /// loss, in their memory, and passes them on.
  static variable_list scale_gradients(AutogradContext& context,
                                       const variable_list& saved,
                                       const Tensor& factor) {
    const auto scaled = [&](size_t which, torch::ScalarType type) {
      // Has a version of its own: autograd must not take this for a modification.
      Tensor unit = saved[which].variable_data();
      if (unit.scalar_type() == type) {
        detail::scaled_sum(unit, unit, factor, /*add=*/false);
        return unit;
      }
      Tensor result = torch::empty(unit.sizes(), unit.options().dtype(type));
      detail::scaled_sum(result, unit, factor, /*add=*/false);
      return result;
    };
    Tensor hidden, weight, bias;
    if (context.needs_input_grad(0)) {
      hidden = scaled(kUnitHidden, saved[kHidden].scalar_type());
    }
    if (saved[kBias].numel() > 0 && context.needs_input_grad(2)) {
      bias = scaled(kUnitBias, saved[kBias].scalar_type());
    }
    if (context.needs_input_grad(1)) {
      auto& data = context.saved_data;
      if (data.count("weight") == 0) {
        weight = scaled(kUnitWeight, saved[kWeight].scalar_type());
      } else {
        Tensor owner = data["weight"].toTensor();
        Tensor& gradient = owner.mutable_grad();
        if (gradient.defined()) {
          detail::scaled_sum(gradient, saved[kUnitWeight], factor,
                             /*add=*/true);
        } else {
          gradient = scaled(kUnitWeight, detail::gradient_type(owner));
        }
      }
    }
    return {hidden, weight, bias, {}, {}, {}, {}};
  }

  static Tensor saved_weight_copy(AutogradContext& context,
                                  const CrossEntropySettings& settings) {
    auto& data = context.saved_data;
    if (data.count("copy") > 0) return data["copy"].toTensor();
    if (data.count("weight") == 0) return {};
    return WeightCopies::find(data["weight"].toTensor(), settings.gemm_type,
                              /*padded=*/true);
  }
  static Tensor gradient_of(Tensor weight) {
    Tensor& gradient = weight.mutable_grad();
    if (!gradient.defined()) {
      gradient =
          torch::zeros_like(weight.detach(), detail::gradient_type(weight));
    }
    return gradient;
  }
  /// Float32 if `tensor` has half precision, in which small terms would be lost.
  static Tensor zero_sum_like(const Tensor& tensor) {
    return torch::zeros_like(tensor, tensor.element_size() == 2
                                         ? torch::kFloat
                                         : tensor.scalar_type());
  }
  static Tensor to_type_of(const Tensor& sum, const Tensor& tensor) {
    return sum.defined() ? sum.to(tensor.scalar_type()) : sum;
  }
};

int64_t default_chunk_scores(const Tensor& hidden, const Tensor& weight,
                             bool half, bool gradients_in_forward) {
  if (!hidden.is_cuda()) return kChunkScoresCpu;
  if (!half || !detail::kernels_available(hidden.device())) {
    return kChunkScoresCuda;
  }
  // 64 more rows, since chunks are multiples of a tile.
  if (gradients_in_forward) {
    return std::clamp((kChunkRows + 64) * weight.size(0), kChunkScoresKernels,
                      kMaxChunkScores);
  }
  return std::max(kChunkScoresKernels,
                  (hidden.size(0) / kMaxChunksKernels + 64) * weight.size(0));
}

/// Whether linear_cross_entropy() may compute gradients in the forward. In float16 sums of
/// gradients must be float32: the loss scale, which keeps them within the range of float16,
/// is not known yet.
bool supports_gradients_in_forward(const Tensor& hidden, const Tensor& weight,
                                   const Tensor& bias,
                                   const CrossEntropySettings& settings) {
  const auto needs = [](const Tensor& tensor) {
    return tensor.defined() && tensor.requires_grad();
  };
  return torch::GradMode::is_enabled() &&
         (needs(hidden) || needs(weight) || needs(bias)) &&
         hidden.size(0) > 0 && uses_half(settings) &&
         (settings.gemm_type == torch::kBFloat16 ||
          compat::gemm_widens(hidden.device()));
}

torch::ScalarType loss_type_of(const Tensor& hidden,
                               const LinearCrossEntropyOptions& options) {
  return options.loss_type.value_or(
      hidden.scalar_type() == torch::kDouble ? torch::kDouble : torch::kFloat);
}

void check_arguments(const Tensor& hidden, const Tensor& weight,
                     const Tensor& bias, const Tensor& targets,
                     const LinearCrossEntropyOptions& options) {
  TORCH_CHECK(
      hidden.dim() == 2 && weight.dim() == 2 &&
          hidden.size(1) == weight.size(1),
      "[linear_cross_entropy] expected hidden (N, D) and weight (V, D), "
      "got ",
      hidden.sizes(), " and ", weight.sizes());
  TORCH_CHECK(
      !bias.defined() || (bias.dim() == 1 && bias.size(0) == weight.size(0)),
      "[linear_cross_entropy] expected a bias of ", weight.size(0),
      " values, got ", bias.sizes());
  TORCH_CHECK(targets.dim() == 1 && targets.size(0) == hidden.size(0) &&
                  targets.scalar_type() == torch::kLong,
              "[linear_cross_entropy] expected ", hidden.size(0),
              " targets of type int64, got ", targets.sizes(), " of ",
              targets.scalar_type());
  TORCH_CHECK(
      options.chunk_scores >= 0,
      "[linear_cross_entropy] expected chunk_scores of at least 1, or 0, got ",
      options.chunk_scores);
}

}  // namespace

LinearCrossEntropyResult fallback::linear_cross_entropy(
    const Tensor& hidden, const Tensor& weight, const Tensor& bias,
    const Tensor& targets, const LinearCrossEntropyOptions& options) {
  namespace F = torch::nn::functional;
  check_arguments(hidden, weight, bias, targets, options);
  const Tensor scores = bias.defined() ? torch::addmm(bias, hidden, weight.t())
                                       : torch::mm(hidden, weight.t());
  LinearCrossEntropyResult result;
  result.loss =
      F::cross_entropy(scores.to(loss_type_of(hidden, options)), targets,
                       F::CrossEntropyFuncOptions()
                           .reduction(torch::kSum)
                           .ignore_index(options.ignore_index));
  if (options.count_correct) {
    // No class equals the ignored index, so ignored rows are not counted.
    result.correct = scores.detach().argmax(1).eq(targets).sum();
  }
  return result;
}

LinearCrossEntropyResult linear_cross_entropy(
    const Tensor& hidden, const Tensor& weight, const Tensor& bias,
    const Tensor& targets, const LinearCrossEntropyOptions& options) {
  check_arguments(hidden, weight, bias, targets, options);
  CrossEntropySettings settings;
  settings.ignore_index = options.ignore_index;
  settings.by_columns =
      options.weight_gradient.value_or(hidden.is_cuda()
                                           ? WeightGradientOrder::kByRows
                                           : WeightGradientOrder::kByColumns) ==
      WeightGradientOrder::kByColumns;
  settings.gemm_type = compat::autocast_type(hidden);
  settings.loss_type = loss_type_of(hidden, options);
  const bool gradients =
      supports_gradients_in_forward(hidden, weight, bias, settings) &&
      options.gradients_in_forward.value_or(
          detail::kernels_available(hidden.device()));
  settings.chunk_scores =
      options.chunk_scores > 0
          ? options.chunk_scores
          : default_chunk_scores(hidden, weight, uses_half(settings),
                                 gradients);
  // The scores of a single chunk are kept and not computed again either.
  settings.gradients_in_forward =
      gradients &&
      (options.gradients_in_forward.has_value() ||
       detail::count_chunks(hidden.size(0),
                            settings.chunk_scores / weight.size(0)) > 1);
  const Tensor copy =
      WeightCopies::find(weight, settings.gemm_type, /*padded=*/true);
  const auto results = LinearCrossEntropyOperator::apply(
      hidden, weight, detail::defined_or_empty(bias, hidden), targets,
      detail::defined_or_empty(copy, hidden), settings, options.count_correct);
  return {results[0], options.count_correct ? results[1] : Tensor()};
}

}  // namespace reprise::ops
