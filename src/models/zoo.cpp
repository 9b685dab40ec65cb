#include "base/nearest.h"
#include "base/text_check.h"
#include "models/model_spec.h"
#include "models/own_options.h"

#include <reprise/models/registry.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <set>

namespace reprise::detail {

// reprise_models.inc has the families that CMakeLists.txt registers.
#define REPRISE_REGISTERED(family) std::vector<ModelSpec> family##_models();
#include <reprise_models.inc>
#undef REPRISE_REGISTERED

const std::vector<ModelSpec>& model_specs() {
  static const std::vector<ModelSpec> all = [] {
    std::vector<ModelSpec> specs;
    const auto add = [&specs](std::vector<ModelSpec> family) {
      std::move(family.begin(), family.end(), std::back_inserter(specs));
    };
#define REPRISE_REGISTERED(family) add(family##_models());
#include <reprise_models.inc>
#undef REPRISE_REGISTERED
    return specs;
  }();
  return all;
}

const ModelSpec* find_model_spec(std::string_view name) {
  const auto& specs = model_specs();
  const auto found =
      std::find_if(specs.begin(), specs.end(),
                   [&](const ModelSpec& spec) { return spec.name == name; });
  return found == specs.end() ? nullptr : &*found;
}

ModelOptions image_options(int64_t size, int64_t channels, int64_t classes,
                           int64_t width) {
  ModelOptions options;
  options.image_size = size;
  options.channels = channels;
  options.classes = classes;
  options.width = width;
  return options;
}

}  // namespace reprise::detail

namespace reprise {
namespace {

using detail::ModelSpec;

/// Returns the model of a built-in family.
Model build(const ModelSpec& spec, const ModelOptions& options);

std::vector<ModelEntry>& entries() {
  static std::vector<ModelEntry> all = [] {
    std::vector<ModelEntry> list;
    for (const ModelSpec& spec : detail::model_specs()) {
      list.push_back({.name = spec.name,
                      .description = spec.description,
                      .task = spec.task,
                      .defaults = spec.defaults,
                      .make = [&spec](const ModelOptions& options) {
                        return build(spec, options);
                      }});
    }
    return list;
  }();
  return all;
}

const ModelEntry* find_entry(std::string_view name) {
  for (const ModelEntry& entry : entries()) {
    if (entry.name == name) return &entry;
  }
  return nullptr;
}

const ModelEntry& require_entry(std::string_view name) {
  if (const ModelEntry* found = find_entry(name)) return *found;
  std::vector<std::string> names;
  std::string list;
  for (const ModelEntry& entry : entries()) {
    names.push_back(entry.name);
    list += (list.empty() ? "" : ", ") + entry.name;
  }
  const std::string near = nearest(name, names);
  TORCH_CHECK(near.empty(), "[model] unknown model '", name, "'; did you mean ",
              near, "?");
  TORCH_CHECK(false, "[model] unknown model '", name, "'; expected one of ",
              list);
}

struct CountOption {
  const char* name;  // as on the command line, without dashes
  int64_t ModelOptions::*value;
};
constexpr CountOption kCounts[] = {
    {"depth", &ModelOptions::depth},
    {"width", &ModelOptions::width},
    {"heads", &ModelOptions::heads},
    {"kv-heads", &ModelOptions::kv_heads},
    {"mlp-width", &ModelOptions::mlp_width},
    {"classes", &ModelOptions::classes},
    {"vocab", &ModelOptions::vocab},
    {"seq", &ModelOptions::seq},
    {"image-size", &ModelOptions::image_size},
    {"channels", &ModelOptions::channels},
};

std::string option_names(const ModelOptions& defaults) {
  std::string names;
  const auto add = [&](const char* name) {
    names += (names.empty() ? "" : ", ") + std::string(name);
  };
  for (const auto& option : kCounts) {
    if (defaults.*option.value != 0) add(option.name);
  }
  if (!defaults.norm.empty()) add("norm");
  if (defaults.dropout >= 0) add("dropout");
  return names;
}

/// Sets heads and kv_heads of `options`, whose width is resolved.
void resolve_heads(const ModelEntry& entry, const ModelOptions& given,
                   ModelOptions& options) {
  const ModelOptions& defaults = entry.defaults;
  if (given.heads == 0) {
    const int64_t channels = defaults.width / defaults.heads;
    options.heads = std::max<int64_t>(1, options.width / channels);
  }
  TORCH_CHECK(options.width % options.heads == 0, "[model ", entry.name,
              "] expected a width that is a multiple of its ", options.heads,
              " heads, got ", options.width, "; set heads or width");
  if (defaults.kv_heads == 0) return;
  if (given.kv_heads == 0) {
    options.kv_heads = std::max<int64_t>(
        1, defaults.kv_heads * options.heads / defaults.heads);
    while (options.heads % options.kv_heads != 0) --options.kv_heads;
  }
  TORCH_CHECK(options.heads % options.kv_heads == 0, "[model ", entry.name,
              "] expected kv-heads that divide its ", options.heads,
              " heads, got ", options.kv_heads);
}

ModelOptions resolve(const ModelEntry& entry, const ModelOptions& given) {
  const std::string& name = entry.name;
  const ModelOptions& defaults = entry.defaults;
  const auto check_has = [&](bool has, const char* option) {
    TORCH_CHECK(has, "[model ", name, "] has no option ", option, "; it has ",
                option_names(defaults));
  };
  ModelOptions options = defaults;
  for (const auto& option : kCounts) {
    const int64_t value = given.*option.value;
    if (value == 0) continue;
    check_has(defaults.*option.value != 0, option.name);
    TORCH_CHECK(value > 0, "[model ", name, "] expected a positive ",
                option.name, ", got ", value);
    options.*option.value = value;
  }
  if (!given.norm.empty()) {
    check_has(!defaults.norm.empty(), "norm");
    TORCH_CHECK(given.norm == "batch" || given.norm == "group", "[model ", name,
                "] expected norm batch or group, got '", given.norm, "'");
    options.norm = given.norm;
  }
  if (given.dropout >= 0) {
    check_has(defaults.dropout >= 0, "dropout");
    TORCH_CHECK(given.dropout < 1, "[model ", name,
                "] expected a dropout from 0 to below 1, got ", given.dropout);
    options.dropout = given.dropout;
  }
  if (defaults.heads != 0) resolve_heads(entry, given, options);
  if (defaults.mlp_width != 0 && given.mlp_width == 0) {
    options.mlp_width = std::max<int64_t>(
        1, defaults.mlp_width * options.width / defaults.width);
  }
  options.own = detail::resolve_own_options(entry, given.own);
  return options;
}

/// Throws if an option of the model's own has the name of one that all models have.
void check_new_names(const ModelEntry& entry) {
  for (const OwnOption& option : entry.own_options) {
    bool known = option.name == "norm" || option.name == "dropout";
    for (const auto& count : kCounts) known |= option.name == count.name;
    TORCH_CHECK(!known, "[register_model] option '", option.name, "' of '",
                entry.name,
                "' is a member of ModelOptions; set it in "
                "ModelEntry::defaults instead");
  }
}

}  // namespace

void register_model(ModelEntry entry) {
  TORCH_CHECK(is_plain_name(entry.name),
              "[register_model] expected a name of letters, digits, '.', '-' "
              "and '_', got '",
              entry.name, "'");
  TORCH_CHECK(find_entry(entry.name) == nullptr,
              "[register_model] there is a model '", entry.name,
              "' already; choose another name");
  TORCH_CHECK(entry.make != nullptr,
              "[register_model] expected a function that makes '", entry.name,
              "', got null");
  check_new_names(entry);
  detail::check_own_options(entry);
  entries().push_back(std::move(entry));
}

const ModelEntry& model_entry(std::string_view name) {
  return require_entry(name);
}

ModelOptions resolve_options(std::string_view name, const ModelOptions& given) {
  return resolve(require_entry(name), given);
}

std::vector<ModelInfo> model_list() {
  std::vector<ModelInfo> infos;
  for (const ModelEntry& entry : entries()) {
    infos.push_back({entry.name, entry.description});
  }
  return infos;
}

Task task_of(std::string_view name) {
  return require_entry(name).task;
}

namespace {

std::string cost_key_of(const std::string& name, const ModelOptions& o) {
  return fmt::format(
      "{} depth {} width {} heads {} kv-heads {} mlp-width {} classes {} "
      "vocab {} seq {} image-size {} channels {} norm {} dropout {}",
      name, o.depth, o.width, o.heads, o.kv_heads, o.mlp_width, o.classes,
      o.vocab, o.seq, o.image_size, o.channels, o.norm, o.dropout);
}

Model build(const ModelSpec& spec, const ModelOptions& options) {
  detail::BuiltModel built = spec.build(spec.name, options);
  const auto linear_parameters = [root = built.root,
                                  more = std::move(built.linear_parameters)] {
    std::vector<torch::Tensor> found, biases;
    for (const auto& module : root->modules(/*include_self=*/false)) {
      if (const auto* layer = module->as<torch::nn::Linear>()) {
        found.push_back(layer->weight);
        if (layer->bias.defined()) biases.push_back(layer->bias);
      }
    }
    found.insert(found.end(), biases.begin(), biases.end());
    if (more) {
      for (auto& parameter : more()) found.push_back(std::move(parameter));
    }
    return found;
  };
  if (!built.packed_groups) {
    built.packed_groups = [] {
      return std::vector<std::vector<torch::Tensor>>{};
    };
  }
  Model model{.name = spec.name,
              .root = std::move(built.root),
              .chain = Chain(std::move(built.stages))};
  model.linear_parameters = linear_parameters;
  model.embeddings = std::move(built.embeddings);
  model.packed_groups = std::move(built.packed_groups);
  model.cost_key = cost_key_of(spec.name, options);
  model.metrics = {"accuracy"};
  return model;
}

}  // namespace

Model make_model(std::string_view name, const ModelOptions& options) {
  const ModelEntry& entry = require_entry(name);
  const ModelOptions resolved = resolve(entry, options);
  Model model = entry.make(resolved);
  TORCH_CHECK(model.root != nullptr, "[model ", entry.name,
              "] expected a model with modules, got none; set Model::root");
  if (!model.cost_key.empty()) {
    for (const auto& [option, value] : resolved.own) {
      model.cost_key +=
          fmt::format(" {} {}", option, detail::option_text(value));
    }
  }
  model.name = entry.name;
  model.options = resolved;
  model.task = entry.task;
  return model;
}

Tensors random_batch(Task task, const ModelOptions& o, int64_t samples,
                     torch::Device device) {
  const auto images = [&] {
    return torch::randn({samples, o.channels, o.image_size, o.image_size},
                        torch::device(device));
  };
  const auto integers = [&](int64_t below, torch::IntArrayRef sizes) {
    return torch::randint(below, sizes,
                          torch::dtype(torch::kLong).device(device));
  };
  switch (task) {
    case Task::kImages:
      return {images(), integers(o.classes, {samples})};
    case Task::kPixels:
      return {images(),
              integers(o.classes, {samples, o.image_size, o.image_size})};
    case Task::kSequences:
      return {integers(o.vocab, {samples, o.seq}),
              integers(o.classes, {samples})};
    case Task::kLanguage: {
      torch::Tensor targets = integers(o.vocab, {samples, o.seq});
      targets.select(1, 0).fill_(-100);
      return {integers(o.vocab, {samples, o.seq}), targets};
    }
    case Task::kOther:
      break;
  }
  TORCH_CHECK(false,
              "[random_batch] expected a task of the built-in datasets, got "
              "kOther; take a batch of the model's own dataset");
}

int64_t parameter_count(const Model& model) {
  std::set<const void*> seen;
  int64_t count = 0;
  for (const auto& parameter : model.root->parameters()) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) {
      count += parameter.numel();
    }
  }
  return count;
}

}  // namespace reprise
