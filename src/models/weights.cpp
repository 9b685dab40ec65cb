#include <reprise/data/safetensors.h>
#include <reprise/models/weights.h>

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

using torch::Tensor;
using TensorMap = std::map<std::string, Tensor>;

/// How files of a family differ from one another.
struct Family {
  std::string model_prefix;  // of the names of models
  std::string body;          // leads names, or not
  std::string head;          // may be missing as a whole
  /// Second names of tensors: stored twice, or under this name only.
  std::map<std::string, std::string> tied = {};
  /// Parts of other models around the same body: heads of other tasks.
  std::vector<std::string> foreign = {};
};

const Family& family_of(const std::string& model) {
  static const std::vector<Family> families = {
      {"gpt2",
       "transformer.",
       "",
       {{"lm_head.weight", "transformer.wte.weight"}}},
      {"bert", "bert.", "classifier.", {}, {"cls."}},
      {"vit", "vit.", "classifier.", {}, {"pooler.", "vit.pooler."}},
      {"resnet", "", "fc."},
      {"vgg", "", "classifier.6."},
      {"", "", "head."},
  };
  return *std::find_if(families.begin(), families.end(), [&](const Family& f) {
    return model.starts_with(f.model_prefix);
  });
}

/// Everything of the model that a file holds.
TensorMap tensors_of(const Model& model) {
  TensorMap all;
  for (const auto& item : model.root->named_parameters()) {
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
         name.ends_with("embeddings.token_type_ids");
}

void replace_end(std::string& name, std::string_view old_end,
                 std::string_view new_end) {
  if (!name.ends_with(old_end)) return;
  name.replace(name.size() - old_end.size(), old_end.size(), new_end);
}

/// The model's name for a tensor of a file; nothing where it has none.
std::optional<std::string> own_name(std::string name, const Family& family,
                                    const TensorMap& own) {
  // Left by wrappers that train on several devices.
  if (name.starts_with("module.")) name.erase(0, 7);
  // Old files of BERT, converted from TensorFlow.
  replace_end(name, "LayerNorm.gamma", "LayerNorm.weight");
  replace_end(name, "LayerNorm.beta", "LayerNorm.bias");
  for (const std::string& full : {name, family.body + name}) {
    const auto tied = family.tied.find(full);
    if (tied != family.tied.end()) return tied->second;
    if (own.contains(full)) return full;
  }
  return std::nullopt;
}

bool is_foreign(const std::string& name, const Family& family) {
  return std::any_of(
      family.foreign.begin(), family.foreign.end(),
      [&](const std::string& part) { return name.starts_with(part); });
}

std::string list_of(const std::vector<std::string>& names) {
  constexpr size_t kShown = 3;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) {
    text += (i == 0 ? "'" : ", '") + names[i] + "'";
  }
  if (names.size() > kShown) {
    text += " and " + std::to_string(names.size() - kShown) + " more";
  }
  return text;
}

void check_shape(const SafeTensors& file, const std::string& name,
                 const Tensor& tensor) {
  const auto& shape = file.entries().at(name).shape;
  TORCH_CHECK(tensor.sizes() == c10::IntArrayRef(shape), "[weights] ",
              file.path(), ": tensor '", name, "' has shape ",
              c10::IntArrayRef(shape), ", expected ", tensor.sizes());
}

/// Missing tensors, less those that may be.
std::vector<std::string> missing_of(
    const TensorMap& own, const Family& family,
    const std::map<std::string, std::string>& sources) {
  const auto in_head = [&](const std::string& name) {
    return !family.head.empty() && name.starts_with(family.head);
  };
  const bool has_head =
      std::any_of(sources.begin(), sources.end(),
                  [&](const auto& item) { return in_head(item.first); });
  std::vector<std::string> missing;
  for (const auto& [name, tensor] : own) {
    if (sources.contains(name)) continue;
    if (in_head(name) && !has_head) continue;
    // Files from before the counter existed; it is not used.
    if (name.ends_with("num_batches_tracked")) continue;
    missing.push_back(name);
  }
  return missing;
}

}  // namespace

void load_weights(Model& model, const std::string& path) {
  const SafeTensors file(path);
  const Family& family = family_of(model.name);
  TensorMap own = tensors_of(model);
  std::map<std::string, std::string> sources;  // in the file, by own name
  std::vector<std::string> unknown;
  for (const auto& [name, entry] : file.entries()) {
    const auto full = own_name(name, family, own);
    if (!full) {
      if (!is_constant(name) && !is_foreign(name, family)) {
        unknown.push_back(name);
      }
      continue;
    }
    check_shape(file, name, own.at(*full));
    const auto [first, inserted] = sources.emplace(*full, name);
    TORCH_CHECK(
        inserted || torch::equal(file.read(first->second), file.read(name)),
        "[weights] ", path, ": tensors '", first->second, "' and '", name,
        "' are one in ", model.name, ", but differ");
  }
  TORCH_CHECK(unknown.empty(), "[weights] ", path, ": ", model.name,
              " has no tensor ", list_of(unknown),
              "; is the file of another model, or of another depth?");
  const auto missing = missing_of(own, family, sources);
  TORCH_CHECK(missing.empty(), "[weights] ", path, ": expected tensor ",
              list_of(missing), ", which the file does not have");
  TORCH_CHECK(!sources.empty(), "[weights] ", path, ": the file is empty");

  const torch::NoGradGuard no_grad;
  for (const auto& [name, source] : sources) {
    own.at(name).copy_(file.read(source));
  }
}

void export_weights(const Model& model, const std::string& path) {
  NamedTensors list;
  for (const auto& item : model.root->named_parameters()) {
    list.emplace_back(item.key(), item.value());
  }
  for (const auto& item : model.root->named_buffers()) {
    list.emplace_back(item.key(), item.value());
  }
  // Without it Hugging Face refuses the file.
  write_safetensors(path, list, {{"format", "pt"}});
}

}  // namespace reprise
