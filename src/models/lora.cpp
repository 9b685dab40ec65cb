#include "base/nearest.h"
#include "base/text_check.h"
#include "models/lora_adapter.h"

#include <reprise/ops/dropout.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/init.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <sstream>
#include <utility>

namespace reprise {

using torch::Tensor;

namespace detail {
namespace {

constexpr const char* kModuleA = "lora_A";
constexpr const char* kModuleB = "lora_B";

/// y + scale · (x aᵀ) bᵀ. The product is added by the matrix product, so that no tensor of
/// the size of y is made besides the result.
Tensor add_low_rank(const Tensor& y, const Tensor& x, const Tensor& a,
                    const Tensor& b, double scale) {
  const Tensor inner = torch::linear(x, a);
  // Not a view to autograd, so that the next operator may work in place.
  return torch::_unsafe_view(
      torch::addmm(y.reshape({-1, y.size(-1)}),
                   inner.reshape({-1, inner.size(-1)}), b.t(), 1, scale),
      y.sizes());
}

/// Whether `target` selects the layer `name`.
bool selects(const std::string& target, const std::string& name) {
  return name == target || name.ends_with("." + target);
}

std::string last_part(const std::string& name) {
  return name.substr(name.rfind('.') + 1);  // all of it if there is no dot
}

void check_targets(const std::vector<std::string>& targets,
                   const std::vector<NamedLoraLayer>& layers,
                   const std::string& model) {
  std::vector<std::string> names;
  for (const auto& layer : layers) {
    const std::string part = last_part(layer.name);
    if (std::find(names.begin(), names.end(), part) == names.end()) {
      names.push_back(part);
    }
  }
  TORCH_CHECK(!layers.empty(), "[add_lora] ", model,
              " has no layer that can have an adapter; make them LoraLinear");
  for (const std::string& target : targets) {
    const bool found = std::any_of(
        layers.begin(), layers.end(),
        [&](const auto& layer) { return selects(target, layer.name); });
    if (found) continue;
    const std::string hint = did_you_mean(target, names);
    TORCH_CHECK(false, "[add_lora] ", model, " has no linear layer ",
                quoted_name(target),
                hint.empty() ? fmt::format("; expected some of {}, or {}",
                                           fmt::join(names, ", "), kAllLinear)
                             : hint);
  }
}

void add_adapter_to(const NamedLoraLayer& layer, const LoraOptions& options) {
  const Tensor weight = layer.layer->adapted_weight();
  const bool in_out = layer.layer->weight_layout() == ops::WeightLayout::kInOut;
  const int64_t in = weight.size(in_out ? 0 : 1);
  const int64_t out = weight.size(in_out ? 1 : 0);
  const auto like = weight.options().requires_grad(false);
  auto adapter = std::make_shared<LoraAdapter>();
  adapter->options = options;
  Tensor a = torch::empty({options.rank, in}, like);
  torch::nn::init::kaiming_uniform_(a, std::sqrt(5.0));
  adapter->a = layer.module->register_module(
      kModuleA, std::make_shared<LoraMatrixImpl>(a));
  adapter->b = layer.module->register_module(
      kModuleB, std::make_shared<LoraMatrixImpl>(
                    torch::zeros({out, options.rank}, like)));
  adapter->a->train(layer.module->is_training());
  LoraAccess::adapter(*layer.layer) = std::move(adapter);
}

}  // namespace

std::vector<NamedLoraLayer> lora_layers(const Model& model) {
  std::vector<NamedLoraLayer> layers;
  std::set<const void*> seen;
  for (const auto& item : model.root->named_modules()) {
    auto* layer = dynamic_cast<LoraLayer*>(item.value().get());
    if (layer == nullptr || !seen.insert(layer).second) continue;
    layers.push_back({item.key(), item.value(), layer});
  }
  return layers;
}

std::vector<NamedLoraLayer> adapted_layers(const Model& model) {
  auto layers = lora_layers(model);
  std::erase_if(layers,
                [](const auto& layer) { return layer.adapter() == nullptr; });
  return layers;
}

std::vector<std::string> split_targets(const std::string& targets) {
  std::vector<std::string> words;
  std::istringstream text(targets);
  for (std::string word; std::getline(text, word, ',');) {
    word.erase(0, word.find_first_not_of(' '));
    word.erase(word.find_last_not_of(' ') + 1);
    if (!word.empty()) words.push_back(word);
  }
  return words;
}

bool is_adapter_parameter(const std::string& name) {
  return name.ends_with(".lora_A.weight") || name.ends_with(".lora_B.weight");
}

Tensor merged_weight(const LoraLayer& layer, const LoraAdapter& adapter) {
  const torch::NoGradGuard no_grad;
  const Tensor weight = layer.adapted_weight().detach();
  const Tensor a = adapter.a->weight.detach(), b = adapter.b->weight.detach();
  const double scale = adapter.options.scale();
  return layer.weight_layout() == ops::WeightLayout::kInOut
             ? torch::addmm(weight, a.t(), b.t(), 1, scale)
             : torch::addmm(weight, b, a, 1, scale);
}

}  // namespace detail

Tensor lora_linear(const Tensor& x, const Tensor& weight, const Tensor& bias,
                   const Tensor& a, const Tensor& b, double scale) {
  return detail::add_low_rank(ops::linear(x, weight, bias), x, a, b, scale);
}

Tensor LoraLayer::add_adapter(const Tensor& x, const Tensor& y) const {
  if (adapter_ == nullptr) return y;
  const auto& [options, a, b] = *adapter_;
  return detail::add_low_rank(
      y, ops::dropout(x, options.dropout, a->is_training()), a->weight,
      b->weight, options.scale());
}

void add_lora(Model& model, const LoraOptions& options) {
  TORCH_CHECK(options.rank > 0,
              "[add_lora] expected a rank of at least 1, got ", options.rank);
  TORCH_CHECK(options.dropout >= 0 && options.dropout < 1 && options.alpha >= 0,
              "[add_lora] expected a dropout from 0 to below 1 and an alpha of "
              "at least 0, got ",
              options.dropout, " and ", options.alpha);
  TORCH_CHECK(!has_lora(model), "[add_lora] ", model.name,
              " has adapters already; call merge_lora() first");
  const auto layers = detail::lora_layers(model);
  auto targets = detail::split_targets(options.targets);
  std::erase(targets, detail::kAllLinear);
  detail::check_targets(targets, layers, model.name);
  for (auto& parameter : model.root->parameters()) {
    parameter.set_requires_grad(false);
  }
  const auto selected = [&](const std::string& name) {
    return targets.empty() ||
           std::any_of(targets.begin(), targets.end(),
                       [&](const std::string& target) {
                         return detail::selects(target, name);
                       });
  };
  for (const auto& layer : layers) {
    if (selected(layer.name)) detail::add_adapter_to(layer, options);
  }
  if (!model.cost_key.empty()) {
    model.cost_key += fmt::format(" lora {} of {} dropout {}", options.rank,
                                  fmt::join(targets, ","), options.dropout);
  }
}

bool has_lora(const Model& model) {
  return !detail::adapted_layers(model).empty();
}

void merge_lora(Model& model) {
  const auto layers = detail::adapted_layers(model);
  TORCH_CHECK(!layers.empty(), "[merge_lora] ", model.name,
              " has no adapters; call add_lora() first");
  for (const auto& layer : layers) {
    const torch::NoGradGuard no_grad;
    layer.layer->adapted_weight().copy_(
        detail::merged_weight(*layer.layer, *layer.adapter()));
    layer.module->unregister_module(detail::kModuleA);
    layer.module->unregister_module(detail::kModuleB);
    detail::LoraAccess::adapter(*layer.layer) = nullptr;
  }
  for (auto& parameter : model.root->parameters()) {
    parameter.set_requires_grad(true);
  }
  if (const auto at = model.cost_key.find(" lora "); at != std::string::npos) {
    model.cost_key.resize(at);
  }
}

}  // namespace reprise
