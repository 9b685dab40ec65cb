#include "base/text_check.h"
#include "models/lora_adapter.h"
#include "models/model_spec.h"
#include "models/weight_files.h"

#include <reprise/data/safetensors.h>
#include <reprise/models/model.h>

#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/utils.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

namespace reprise {
namespace {

using detail::WeightFiles;
using detail::WeightNames;
using torch::Tensor;
using TensorMap = std::map<std::string, Tensor>;

WeightNames weight_names(const Model& model) {
  const detail::ModelSpec* spec = detail::find_model_spec(model.name);
  return spec == nullptr ? WeightNames{} : spec->weights;
}

/// Parameters and buffers by name, without those of adapters.
TensorMap tensors_of(const Model& model) {
  TensorMap all;
  for (const auto& item : model.root->named_parameters()) {
    if (detail::is_adapter_parameter(item.key())) continue;
    all.emplace(item.key(), item.value());
  }
  for (const auto& item : model.root->named_buffers()) {
    all.emplace(item.key(), item.value());
  }
  return all;
}

bool is_constant(const std::string& name) {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") ||
         name.ends_with("embeddings.position_ids") ||
         name.ends_with("embeddings.token_type_ids") ||
         name.ends_with(".rotary_emb.inv_freq");
}

void replace_end(std::string& name, std::string_view old_end,
                 std::string_view new_end) {
  if (!name.ends_with(old_end)) return;
  name.replace(name.size() - old_end.size(), old_end.size(), new_end);
}

/// The model's name for a tensor of a file; nothing if it has no such tensor.
std::optional<std::string> own_name(std::string name, const WeightNames& names,
                                    const TensorMap& own) {
  // Added by wrappers for training on several devices.
  if (name.starts_with("module.")) name.erase(0, 7);
  // In old BERT files, converted from TensorFlow.
  replace_end(name, "LayerNorm.gamma", "LayerNorm.weight");
  replace_end(name, "LayerNorm.beta", "LayerNorm.bias");
  for (const std::string& full : {name, names.body_prefix + name}) {
    const auto tied = names.tied.find(full);
    if (tied != names.tied.end()) return tied->second;
    if (own.contains(full)) return full;
  }
  return std::nullopt;
}

bool is_foreign(const std::string& name, const WeightNames& names) {
  return std::any_of(
      names.foreign_prefixes.begin(), names.foreign_prefixes.end(),
      [&](const std::string& prefix) { return name.starts_with(prefix); });
}

std::string list_of(const std::vector<std::string>& names) {
  constexpr size_t kShown = 3;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) {
    text += (i == 0 ? "" : ", ") + quoted_name(names[i]);
  }
  if (names.size() > kShown) {
    text += " and " + std::to_string(names.size() - kShown) + " more";
  }
  return text;
}

void check_shape(const WeightFiles& files, const std::string& name,
                 const Tensor& tensor) {
  const auto& shape = files.shape(name);
  TORCH_CHECK(tensor.sizes() == c10::IntArrayRef(shape), "[weights] ",
              files.path(), ": tensor ", quoted_name(name), " has shape ",
              c10::IntArrayRef(shape), ", expected ", tensor.sizes());
}

/// Tensors that the file lacks, except for those that may be missing.
std::vector<std::string> missing_of(
    const TensorMap& own, const WeightNames& names,
    const std::map<std::string, std::string>& sources) {
  const auto in_head = [&](const std::string& name) {
    return !names.head_prefix.empty() && name.starts_with(names.head_prefix);
  };
  const bool has_head =
      std::any_of(sources.begin(), sources.end(),
                  [&](const auto& item) { return in_head(item.first); });
  std::vector<std::string> missing;
  for (const auto& [name, tensor] : own) {
    if (sources.contains(name)) continue;
    if (in_head(name) && !has_head) continue;
    // Older files have no such counter, and it is not used.
    if (name.ends_with("num_batches_tracked")) continue;
    missing.push_back(name);
  }
  return missing;
}

}  // namespace

void load_weights(Model& model, const std::string& path) {
  const WeightFiles files(path);
  const WeightNames names = weight_names(model);
  TensorMap own = tensors_of(model);
  std::map<std::string, std::string> sources;  // name in the file, by own name
  std::vector<std::string> unknown;
  for (const std::string& name : files.names()) {
    const auto full = own_name(name, names, own);
    if (!full) {
      if (!is_constant(name) && !is_foreign(name, names)) {
        unknown.push_back(name);
      }
      continue;
    }
    check_shape(files, name, own.at(*full));
    const auto [first, inserted] = sources.emplace(*full, name);
    TORCH_CHECK(
        inserted || torch::equal(files.read(first->second), files.read(name)),
        "[weights] ", path, ": tensors ", quoted_name(first->second), " and ",
        quoted_name(name), " are tied in ", model.name, ", but differ");
  }
  TORCH_CHECK(unknown.empty(), "[weights] ", path, ": ", model.name,
              " has no tensor ", list_of(unknown),
              "; is it a file of another model or depth?");
  const auto missing = missing_of(own, names, sources);
  TORCH_CHECK(missing.empty(), "[weights] ", path, ": expected tensor ",
              list_of(missing), ", which the file does not have");
  TORCH_CHECK(!sources.empty(), "[weights] ", path, ": the file is empty");

  const torch::NoGradGuard no_grad;
  for (const auto& [name, source] : sources) {
    own.at(name).copy_(files.read(source));
  }
}

void export_weights(const Model& model, const std::string& path,
                    int64_t part_bytes) {
  std::map<const void*, Tensor> merged;  // by weight
  for (const auto& layer : detail::adapted_layers(model)) {
    merged.emplace(layer.layer->adapted_weight().unsafeGetTensorImpl(),
                   detail::merged_weight(*layer.layer, *layer.adapter()).cpu());
  }
  NamedTensors list;
  for (const auto& item : model.root->named_parameters()) {
    if (detail::is_adapter_parameter(item.key())) continue;
    const auto found = merged.find(item.value().unsafeGetTensorImpl());
    list.emplace_back(item.key(),
                      found == merged.end() ? item.value() : found->second);
  }
  for (const auto& item : model.root->named_buffers()) {
    list.emplace_back(item.key(), item.value());
  }
  detail::write_weights(path, list, part_bytes);
}

}  // namespace reprise
