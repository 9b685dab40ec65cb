#pragma once

#include <reprise/models/model.h>
#include <reprise/ops/linear.h>

#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <memory>
#include <string>

/// Low-rank adapters (Hu et al., LoRA: Low-Rank Adaptation of Large Language Models). A
/// linear layer W x + b becomes W x + b + alpha / rank · B A x, and only A (rank, in) and
/// B (out, rank) are trained. Frozen weights need neither gradients nor optimizer state.
///
///     Model model = make_model("llama-3.2-1b");
///     load_weights(model, "Llama-3.2-1B");
///     add_lora(model, {.rank = 8, .targets = "q_proj,v_proj"});
///     train(model);                          // like any other model
///     save_lora(model, "adapter");           // as Hugging Face's PEFT does
namespace reprise {

namespace detail {
struct LoraAdapter;
struct LoraAccess;
}  // namespace detail

struct LoraOptions {
  int64_t rank = 0;    ///< rows of A; 0: no adapters
  double alpha = 0;    ///< the scale is alpha / rank; 0: a scale of 1
  double dropout = 0;  ///< of the adapters' inputs, in training
  /// Layers to adapt, separated by commas: "q_proj,v_proj". A layer matches if its name is
  /// the target or ends in a dot and the target. Empty or "all-linear": all layers that
  /// can have an adapter, which excludes the output layers.
  std::string targets{};

  double scale() const {
    return alpha > 0 ? alpha / static_cast<double>(rank) : 1;
  }
};

/// x Wᵀ + bias + scale · (x Aᵀ) Bᵀ for x (…, in), weight (out, in), a (rank, in) and
/// b (out, rank); bias (out) or undefined. For layers that are no LoraLayer.
torch::Tensor lora_linear(const torch::Tensor& x, const torch::Tensor& weight,
                          const torch::Tensor& bias, const torch::Tensor& a,
                          const torch::Tensor& b, double scale);

/// Base of the modules that can have an adapter. The built-in models consist of such
/// layers, their output layers excepted. In an own model, LoraLinear takes the place of
/// torch::nn::Linear.
class LoraLayer {
 public:
  virtual ~LoraLayer() = default;

  /// Weight that the adapter adds to, and its layout.
  virtual torch::Tensor adapted_weight() const = 0;
  virtual ops::WeightLayout weight_layout() const {
    return ops::WeightLayout::kOutIn;
  }

  bool has_adapter() const { return adapter_ != nullptr; }

  /// Returns y, the output of the layer for x, plus the output of its adapter; y itself if
  /// it has none.
  torch::Tensor add_adapter(const torch::Tensor& x,
                            const torch::Tensor& y) const;

 private:
  friend struct detail::LoraAccess;
  std::shared_ptr<detail::LoraAdapter> adapter_;  // null: none
};

/// torch::nn::Linear that can have an adapter. Uses ops::linear().
class LoraLinearImpl : public torch::nn::LinearImpl, public LoraLayer {
 public:
  using torch::nn::LinearImpl::LinearImpl;
  torch::Tensor forward(const torch::Tensor& x) {
    return add_adapter(x, ops::linear(x, weight, bias));
  }
  torch::Tensor adapted_weight() const override { return weight; }
};
TORCH_MODULE(LoraLinear);

/// Adds an adapter to each layer that `options.targets` selects, and freezes all other
/// parameters of `model`. A is drawn from LibTorch's default generator, uniformly within
/// ±1/√in, and B is zero, as in PEFT: the model computes the same as before. The adapters
/// are modules "lora_A" and "lora_B" of their layer, each with a parameter "weight".
///
/// Throws c10::Error if the rank is less than 1, if the model has adapters already, or if a
/// target matches no layer; the error has the nearest names.
void add_lora(Model& model, const LoraOptions& options);

/// Whether the model has adapters.
bool has_lora(const Model& model);

/// Adds B A, times the scale, to the weight of each adapted layer and removes the adapters.
/// All parameters are trained again. Throws c10::Error if the model has no adapters.
void merge_lora(Model& model);

/// Writes the adapters as PEFT does: adapter_config.json and adapter_model.safetensors in
/// `directory`, which is made if need be. Throws c10::Error if the model has no adapters,
/// and reprise::Error if the files cannot be written.
void save_lora(const Model& model, const std::string& directory);

/// Adds the adapters that save_lora() or PEFT saved in `directory` to `model`, as
/// add_lora() does. Throws c10::Error if the model has adapters already, if a file is
/// missing or invalid, if the adapters do not fit the model, or if they use a variant of
/// LoRA that is not supported.
void load_lora(Model& model, const std::string& directory);

}  // namespace reprise
