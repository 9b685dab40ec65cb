#include "base/nearest.h"
#include "models/family.h"
#include "models/transformer.h"

#include <reprise/models/model.h>

#include <c10/util/Exception.h>
#include <torch/nn/init.h>

#include <algorithm>
#include <set>

namespace reprise {
namespace {

struct Spec {
  ModelInfo info;
  Task task;
  /// What is zero, empty or negative here is an option the model does not have.
  ModelOptions defaults;
  detail::Builder build;
};

ModelOptions image_defaults(int64_t size, int64_t channels, int64_t classes,
                            int64_t width = 0) {
  ModelOptions options;
  options.image_size = size;
  options.channels = channels;
  options.classes = classes;
  options.width = width;
  return options;
}

/// Heads of 64, which all of these have.
ModelOptions transformer_defaults(int64_t depth, int64_t width,
                                  double dropout) {
  ModelOptions options;
  options.depth = depth;
  options.width = width;
  options.heads = width / 64;
  options.dropout = dropout;
  return options;
}

ModelOptions gpt2_defaults(int64_t depth, int64_t width) {
  ModelOptions options = transformer_defaults(depth, width, 0.1);
  options.vocab = 50257;
  options.seq = 1024;
  return options;
}

ModelOptions bert_defaults(int64_t depth, int64_t width) {
  ModelOptions options = transformer_defaults(depth, width, 0.1);
  options.vocab = 30522;
  options.seq = 512;
  options.classes = 2;
  return options;
}

ModelOptions vit_defaults(int64_t depth, int64_t width) {
  ModelOptions options = transformer_defaults(depth, width, 0.0);
  options.image_size = 224;
  options.channels = 3;
  options.classes = 1000;
  return options;
}

std::vector<Spec> make_specs() {
  ModelOptions mlp = image_defaults(28, 1, 10, 512);
  mlp.depth = 4;
  mlp.dropout = 0;
  ModelOptions cnn_basic = image_defaults(224, 1, 10);
  cnn_basic.norm = "batch";
  ModelOptions cnn_blocks = image_defaults(112, 1, 10, 16);
  cnn_blocks.depth = 5;
  ModelOptions vgg16 = image_defaults(224, 3, 1000, 64);
  vgg16.dropout = 0.5;
  const ModelOptions resnet = image_defaults(224, 3, 1000, 64);
  ModelOptions unet = image_defaults(128, 1, 11, 64);
  unet.depth = 4;
  return {
      {{"mlp", "linear layers on flattened images"},
       Task::kImages,
       mlp,
       detail::build_mlp},
      {{"cnn-basic", "convolutions that halve the image, 28 to 3584 pixels"},
       Task::kImages,
       cnn_basic,
       detail::build_cnn_basic},
      {{"cnn-blocks", "blocks of convolution, norm, ReLU and pool"},
       Task::kImages,
       cnn_blocks,
       detail::build_cnn_blocks},
      {{"cnn-profile", "11 convolutions and pools at nearly one size"},
       Task::kImages,
       image_defaults(256, 1, 10),
       detail::build_cnn_profile},
      {{"vgg16", "torchvision's vgg16, 138M parameters"},
       Task::kImages,
       vgg16,
       detail::build_vgg16},
      {{"resnet18", "torchvision's resnet18, 11.7M"},
       Task::kImages,
       resnet,
       detail::build_resnet18},
      {{"resnet50", "torchvision's resnet50, 25.6M"},
       Task::kImages,
       resnet,
       detail::build_resnet50},
      {{"resnet101", "torchvision's resnet101, 44.5M"},
       Task::kImages,
       resnet,
       detail::build_resnet101},
      {{"unet", "a class a pixel, skip connections across stages"},
       Task::kPixels,
       unet,
       detail::build_unet},
      {{"bert-base", "sequence classification, 109M"},
       Task::kSequences,
       bert_defaults(12, 768),
       detail::build_bert},
      {{"bert-large", "sequence classification, 335M"},
       Task::kSequences,
       bert_defaults(24, 1024),
       detail::build_bert},
      {{"gpt2", "language model, 124M"},
       Task::kLanguage,
       gpt2_defaults(12, 768),
       detail::build_gpt2},
      {{"gpt2-medium", "language model, 355M"},
       Task::kLanguage,
       gpt2_defaults(24, 1024),
       detail::build_gpt2},
      {{"gpt2-large", "language model, 774M"},
       Task::kLanguage,
       gpt2_defaults(36, 1280),
       detail::build_gpt2},
      {{"gpt2-xl", "language model, 1558M"},
       Task::kLanguage,
       gpt2_defaults(48, 1600),
       detail::build_gpt2},
      {{"vit-b-16", "image classification by patches, 86.6M"},
       Task::kImages,
       vit_defaults(12, 768),
       detail::build_vit},
      {{"vit-l-16", "image classification by patches, 304M"},
       Task::kImages,
       vit_defaults(24, 1024),
       detail::build_vit},
  };
}

const std::vector<Spec>& specs() {
  static const std::vector<Spec> all = make_specs();
  return all;
}

const Spec& find_spec(std::string_view name) {
  std::vector<std::string> names;
  std::string list;
  for (const Spec& spec : specs()) {
    if (spec.info.name == name) return spec;
    names.push_back(spec.info.name);
    list += (list.empty() ? "" : ", ") + spec.info.name;
  }
  const std::string near = nearest(name, names);
  TORCH_CHECK(near.empty(), "[model] unknown model '", name, "'; did you mean ",
              near, "?");
  TORCH_CHECK(false, "[model] unknown model '", name, "'; expected one of ",
              list);
}

struct CountOption {
  const char* name;  // as on the command line
  int64_t ModelOptions::*value;
};
constexpr CountOption kCounts[] = {
    {"depth", &ModelOptions::depth},
    {"width", &ModelOptions::width},
    {"heads", &ModelOptions::heads},
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

ModelOptions resolve(const Spec& spec, const ModelOptions& given) {
  const std::string& name = spec.info.name;
  const ModelOptions& defaults = spec.defaults;
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
  if (defaults.heads != 0) {
    if (given.heads == 0) {
      options.heads = std::max<int64_t>(1, options.width / 64);
    }
    TORCH_CHECK(options.width % options.heads == 0, "[model ", name,
                "] expected a width that is a multiple of its ", options.heads,
                " heads, got ", options.width, "; set heads or width");
  }
  return options;
}

}  // namespace

const std::vector<ModelInfo>& model_list() {
  static const std::vector<ModelInfo> list = [] {
    std::vector<ModelInfo> infos;
    for (const Spec& spec : specs()) infos.push_back(spec.info);
    return infos;
  }();
  return list;
}

Task task_of(std::string_view name) {
  return find_spec(name).task;
}

Model make_model(std::string_view name, const ModelOptions& options) {
  const Spec& spec = find_spec(name);
  ModelOptions resolved = resolve(spec, options);
  detail::Built built = spec.build(spec.info.name, resolved);
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
  const auto groups = [root = built.root] {
    std::vector<std::vector<torch::Tensor>> found;
    for (const auto& module : root->modules(/*include_self=*/false)) {
      if (const auto* layer = module->as<detail::SelfAttention>()) {
        for (auto& group : layer->groups()) found.push_back(std::move(group));
      }
    }
    return found;
  };
  return Model{spec.info.name,
               std::move(resolved),
               spec.task,
               std::move(built.root),
               Chain(std::move(built.stages)),
               linear_parameters,
               std::move(built.embeddings),
               groups};
}

Tensors random_batch(Task task, const ModelOptions& o, int64_t samples,
                     torch::Device device) {
  const auto image = [&] {
    return torch::randn({samples, o.channels, o.image_size, o.image_size},
                        torch::device(device));
  };
  const auto whole = [&](int64_t below, torch::IntArrayRef sizes) {
    return torch::randint(below, sizes,
                          torch::dtype(torch::kLong).device(device));
  };
  switch (task) {
    case Task::kImages:
      return {image(), whole(o.classes, {samples})};
    case Task::kPixels:
      return {image(), whole(o.classes, {samples, o.image_size, o.image_size})};
    case Task::kSequences:
      return {whole(o.vocab, {samples, o.seq}), whole(o.classes, {samples})};
    case Task::kLanguage: {
      torch::Tensor targets = whole(o.vocab, {samples, o.seq});
      targets.select(1, 0).fill_(-100);
      return {whole(o.vocab, {samples, o.seq}), targets};
    }
  }
  return {};
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

namespace detail {

void check_image_size(const std::string& name, const ModelOptions& options,
                      bool fits, const std::string& sizes) {
  TORCH_CHECK(fits, "[model ", name, "] cannot take image size ",
              options.image_size, "; it can take ", sizes);
}

ModulePtr add_container(torch::nn::Module& parent, const std::string& name) {
  return parent.register_module(name, std::make_shared<torch::nn::Module>());
}

void normal_init(torch::Tensor weight, double deviation) {
  torch::nn::init::normal_(weight, 0, deviation);
}

void zero_init(torch::Tensor bias) {
  torch::nn::init::zeros_(bias);
}

}  // namespace detail
}  // namespace reprise
