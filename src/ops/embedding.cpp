#include <reprise/ops/embedding.h>
#include <reprise/ops/weight_copies.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

namespace reprise {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kNoPadding = -1;

class EmbeddingOperator : public torch::autograd::Function<EmbeddingOperator> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& weight,
                        const Tensor& tokens, int64_t padding) {
    context->save_for_backward({tokens});
    // The very tensor whose gradient is added to.
    context->saved_data["weight"] = weight;
    context->saved_data["padding"] = padding;
    return torch::embedding(weight, tokens);
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    TORCH_CHECK(!torch::GradMode::is_enabled(),
                "[lean_embedding] has no second derivative");
    Tensor weight = context->saved_data["weight"].toTensor();
    const int64_t padding = context->saved_data["padding"].toInt();
    const Tensor tokens = context->get_saved_variables()[0].flatten();
    Tensor rows = gradients[0].reshape({-1, weight.size(1)});
    if (padding != kNoPadding) {
      rows = rows.masked_fill(tokens.eq(padding).unsqueeze(1), 0);
    }
    Tensor& gradient = weight.mutable_grad();
    if (!gradient.defined()) gradient = torch::zeros_like(weight.detach());
    if (gradient.is_cuda()) {
      // Adding by index_add_ depends on which thread is first.
      gradient.index_put_({tokens}, rows, /*accumulate=*/true);
    } else {
      gradient.index_add_(0, tokens, rows);
    }
    return {{}, {}, {}};
  }
};

}  // namespace

Tensor lean_embedding(const torch::nn::Embedding& layer, const Tensor& tokens) {
  const Tensor& weight = layer->weight;
  const auto& how = layer->options;
  if (!torch::GradMode::is_enabled() || !weight.requires_grad() ||
      !WeightCopies::has(weight) || how.scale_grad_by_freq() || how.sparse() ||
      how.max_norm().has_value()) {
    return torch::nn::Embedding(layer)->forward(tokens);
  }
  return EmbeddingOperator::apply(weight, tokens,
                                  how.padding_idx().value_or(kNoPadding));
}

}  // namespace reprise
