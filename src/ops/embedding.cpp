#include "ops/function.h"

#include <reprise/ops/embedding.h>
#include <reprise/ops/weight_copies.h>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

namespace reprise::ops {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kNoPadding = -1;

class EmbeddingOperator : public torch::autograd::Function<EmbeddingOperator> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& weight,
                        const Tensor& tokens, int64_t padding_index) {
    context->save_for_backward({tokens});
    // Not as a saved variable: the backward needs the tensor that owns the gradient.
    context->saved_data["weight"] = weight;
    context->saved_data["padding_index"] = padding_index;
    return torch::embedding(weight, tokens);
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    detail::check_first_order("embedding");
    Tensor weight = context->saved_data["weight"].toTensor();
    const int64_t padding_index = context->saved_data["padding_index"].toInt();
    const Tensor tokens = context->get_saved_variables()[0].flatten();
    Tensor rows = gradients[0].reshape({-1, weight.size(1)});
    if (padding_index != kNoPadding) {
      rows = rows.masked_fill(tokens.eq(padding_index).unsqueeze(1), 0);
    }
    Tensor& gradient = weight.mutable_grad();
    if (!gradient.defined()) gradient = torch::zeros_like(weight.detach());
    if (gradient.is_cuda()) {
      // On CUDA the result of index_add_ depends on the order of the threads.
      gradient.index_put_({tokens}, rows, /*accumulate=*/true);
    } else {
      gradient.index_add_(0, tokens, rows);
    }
    return {{}, {}, {}};
  }
};

}  // namespace

Tensor fallback::embedding(const torch::nn::Embedding& layer,
                           const Tensor& tokens) {
  return torch::nn::Embedding(layer)->forward(tokens);
}

Tensor embedding(const torch::nn::Embedding& layer, const Tensor& tokens) {
  const Tensor& weight = layer->weight;
  const auto& options = layer->options;
  if (!torch::GradMode::is_enabled() || !weight.requires_grad() ||
      !WeightCopies::has(weight) || options.scale_grad_by_freq() ||
      options.sparse() || options.max_norm().has_value()) {
    return fallback::embedding(layer, tokens);
  }
  return EmbeddingOperator::apply(weight, tokens,
                                  options.padding_idx().value_or(kNoPadding));
}

}  // namespace reprise::ops
