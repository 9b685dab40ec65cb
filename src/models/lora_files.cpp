// Tested by tests/models/lora_test.cpp.
#include "base/file.h"
#include "base/json_text.h"
#include "base/text_check.h"
#include "models/lora_adapter.h"

#include <reprise/base/error.h>
#include <reprise/data/safetensors.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>

namespace reprise {
namespace {

namespace fs = std::filesystem;
using detail::NamedLoraLayer;
using nlohmann::json;
using nlohmann::ordered_json;

constexpr const char* kConfigFile = "adapter_config.json";
constexpr const char* kAdapterFile = "adapter_model.safetensors";
constexpr double kMostRank = 1 << 16;
/// PEFT's wrapper around the model.
constexpr const char* kNamePrefix = "base_model.model.";

/// The targets as PEFT lists them: the last parts of the names for all-linear.
std::vector<std::string> target_modules(
    const std::vector<NamedLoraLayer>& adapted) {
  auto targets = detail::split_targets(adapted[0].adapter()->options.targets);
  std::erase(targets, detail::kAllLinear);
  if (!targets.empty()) return targets;
  std::set<std::string> names;
  for (const auto& layer : adapted) {
    names.insert(layer.name.substr(layer.name.rfind('.') + 1));
  }
  return {names.begin(), names.end()};
}

/// Whole numbers without a fraction, as Python writes them.
json number(double value) {
  if (value == std::floor(value)) return static_cast<int64_t>(value);
  return value;
}

std::string config_text(const Model& model,
                        const std::vector<NamedLoraLayer>& adapted) {
  const LoraOptions& options = adapted[0].adapter()->options;
  const bool in_out =
      adapted[0].layer->weight_layout() == ops::WeightLayout::kInOut;
  const json task = model.task == Task::kLanguage    ? json("CAUSAL_LM")
                    : model.task == Task::kSequences ? json("SEQ_CLS")
                                                     : json(nullptr);
  return ordered_json{{"base_model_name_or_path", model.name},
                      {"bias", "none"},
                      {"fan_in_fan_out", in_out},
                      {"inference_mode", true},
                      {"init_lora_weights", true},
                      {"lora_alpha", number(options.scale() *
                                            static_cast<double>(options.rank))},
                      {"lora_dropout", options.dropout},
                      {"modules_to_save", nullptr},
                      {"peft_type", "LORA"},
                      {"r", options.rank},
                      {"target_modules", target_modules(adapted)},
                      {"task_type", task},
                      {"use_dora", false},
                      {"use_rslora", false}}
             .dump(2) +
         "\n";
}

/// Calls `use(name, parameter)` for the matrices of the adapters, with PEFT's names.
template <class Use>
void for_each_matrix(const std::vector<NamedLoraLayer>& adapted, Use use) {
  for (const auto& layer : adapted) {
    use(kNamePrefix + layer.name + ".lora_A.weight",
        layer.adapter()->a->weight);
    use(kNamePrefix + layer.name + ".lora_B.weight",
        layer.adapter()->b->weight);
  }
}

bool is_set(const json& config, const char* key) {
  const auto found = config.find(key);
  if (found == config.end() || found->is_null()) return false;
  if (found->is_boolean()) return found->get<bool>();
  return !((found->is_array() || found->is_object()) && found->empty());
}

/// Rank for "r" has to be a whole number.
double number_in(const std::string& path, const json& config, const char* key,
                 double low, double high) {
  const json& value = config.at(key);
  const bool whole = std::string_view(key) == "r";
  const bool right = whole ? value.is_number_integer() : value.is_number();
  const double number = right ? value.get<double>() : -1;
  TORCH_CHECK(right && number >= low && number <= high, "[lora] ", path,
              ": expected ", key, ", a ", whole ? "whole number" : "number",
              " from ", low, " to ", high, ", got ", shown_json(value));
  return number;
}

LoraOptions options_in(const std::string& path) {
  const json config = parse_json(read_text(path));
  TORCH_CHECK(config.is_object() && config.contains("peft_type") &&
                  config["peft_type"] == "LORA",
              "[lora] ", path,
              ": expected the configuration of a LoRA adapter, a JSON object "
              "with peft_type LORA");
  for (const char* key :
       {"use_dora", "use_rslora", "modules_to_save", "rank_pattern",
        "alpha_pattern", "layers_to_transform", "exclude_modules",
        "target_parameters", "layer_replication"}) {
    TORCH_CHECK(!is_set(config, key), "[lora] ", path, ": ", key,
                " is not supported");
  }
  TORCH_CHECK(!config.contains("bias") || config["bias"] == "none", "[lora] ",
              path, ": expected bias none, got ", shown_json(config["bias"]));
  LoraOptions options;
  try {
    options.rank = number_in(path, config, "r", 1, kMostRank);
    options.alpha = number_in(path, config, "lora_alpha", 0, 1e9);
    if (config.contains("lora_dropout")) {
      options.dropout = number_in(path, config, "lora_dropout", 0, 1);
    }
    const json& targets = config.at("target_modules");
    options.targets =
        targets.is_string()
            ? targets.get<std::string>()
            : fmt::format(
                  "{}",
                  fmt::join(targets.get<std::vector<std::string>>(), ","));
  } catch (const json::exception& error) {
    TORCH_CHECK(false, "[lora] ", path,
                ": expected r, lora_alpha and target_modules, got: ",
                shortened(error.what()));
  }
  return options;
}

/// Throws unless the file has exactly the matrices of the adapters.
void check_file(const SafeTensors& file,
                const std::vector<NamedLoraLayer>& adapted) {
  std::set<std::string> known;
  for_each_matrix(
      adapted, [&](const std::string& name, const torch::Tensor& parameter) {
        known.insert(name);
        const auto found = file.entries().find(name);
        TORCH_CHECK(found != file.entries().end(), "[lora] ", file.path(),
                    ": expected tensor ", quoted_name(name),
                    ", which the file does not have");
        TORCH_CHECK(parameter.sizes() == c10::IntArrayRef(found->second.shape),
                    "[lora] ", file.path(), ": tensor ", quoted_name(name),
                    " has shape ", c10::IntArrayRef(found->second.shape),
                    ", expected ", parameter.sizes());
      });
  for (const auto& [name, entry] : file.entries()) {
    TORCH_CHECK(known.contains(name), "[lora] ", file.path(),
                ": the model has no adapter for tensor ", quoted_name(name));
  }
}

}  // namespace

void save_lora(const Model& model, const std::string& directory) {
  const auto adapted = detail::adapted_layers(model);
  TORCH_CHECK(!adapted.empty(), "[save_lora] ", model.name,
              " has no adapters; call add_lora() first");
  std::error_code error;
  fs::create_directories(directory, error);
  const std::string why = why_directory_unwritable(directory);
  if (!why.empty()) throw Error("[lora] " + why);
  NamedTensors list;
  for_each_matrix(adapted,
                  [&](const std::string& name, const torch::Tensor& parameter) {
                    list.emplace_back(name, parameter);
                  });
  write_safetensors((fs::path(directory) / kAdapterFile).string(), list,
                    {{"format", "pt"}});
  AtomicFile config((fs::path(directory) / kConfigFile).string());
  config.write(config_text(model, adapted));
  config.commit();
}

void load_lora(Model& model, const std::string& directory) {
  const LoraOptions options =
      options_in((fs::path(directory) / kConfigFile).string());
  const SafeTensors file((fs::path(directory) / kAdapterFile).string());
  try {
    add_lora(model, options);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "[lora] ", directory, ": ",
                without_origin(error.what_without_backtrace()));
  }
  const auto adapted = detail::adapted_layers(model);
  check_file(file, adapted);
  const torch::NoGradGuard no_grad;
  for_each_matrix(adapted,
                  [&](const std::string& name, const torch::Tensor& parameter) {
                    torch::Tensor(parameter).copy_(file.read(name));
                  });
}

}  // namespace reprise
