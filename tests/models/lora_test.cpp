#include "compat/autocast.h"
#include "models/lora_adapter.h"
#include "small_models.h"
#include "support.h"
#include "temporary.h"

#include <reprise/data/safetensors.h>
#include <reprise/models/registry.h>
#include <reprise/ops/weight_copies.h>
#include <reprise/recompute/strategy.h>

#include <nlohmann/json.hpp>
#include <torch/csrc/autograd/autograd.h>

#include <filesystem>
#include <fstream>
#include <set>

namespace reprise {
namespace {

using testing::device;
using testing::error_of;
using testing::on_device;
using testing::relative_error;
using testing::same;
using testing::SmallModel;
using testing::TemporaryDirectory;
using torch::Tensor;

/// A small model without dropout, in `type`.
Model plain_model(const SmallModel& small, torch::ScalarType type) {
  ModelOptions options = small.options;
  if (model_entry(small.name).defaults.dropout >= 0) options.dropout = 0;
  torch::manual_seed(1);
  Model model = make_model(small.name, options);
  model.root->to(type);
  return model;
}

const SmallModel& small_one(const std::string& name) {
  for (const SmallModel& small : testing::small_models()) {
    if (small.name == name) return small;
  }
  throw std::out_of_range(name);
}

/// One model of each family that has adapters.
std::vector<SmallModel> adaptable() {
  std::vector<SmallModel> list;
  for (const char* name :
       {"mlp", "cnn-basic", "vgg16", "bert-base", "gpt2", "llama-small",
        "llama-3-8b", "qwen2.5-0.5b", "vit-b-16"}) {
    list.push_back(small_one(name));
  }
  return list;
}

/// Gives every B a value, so that the adapters have an effect.
void randomize_adapters(const Model& model) {
  const torch::NoGradGuard no_grad;
  torch::manual_seed(2);
  for (const auto& layer : detail::adapted_layers(model)) {
    layer.adapter()->b->weight.normal_(0, 0.1);
  }
}

Tensors batch_for(const Model& model) {
  torch::manual_seed(3);
  Tensors batch = random_batch(model.task, model.options, 3, device());
  if (batch[0].is_floating_point()) {
    batch[0] = batch[0].to(model.root->parameters()[0].scalar_type());
  }
  return batch;
}

/// Loss of one step; the gradients stay in the parameters.
Tensor loss_and_gradients(const Model& model, const char* strategy = "none") {
  torch::manual_seed(5);
  Execution execution(model.chain, make_schedule(strategy, model.chain.size()));
  const Tensors outputs = execution.forward(batch_for(model));
  Tensors gradients(
      outputs.size());  // in evaluation, a metric follows the loss
  gradients[0] = torch::ones_like(outputs[0]);
  execution.backward(std::move(gradients));
  return outputs[0].detach();
}

void clear_gradients(const Model& model) {
  for (Tensor parameter : model.root->parameters()) {
    parameter.mutable_grad().reset();
  }
}

TEST(Lora, ANewAdapterChangesNothing) {
  for (const SmallModel& small : adaptable()) {
    Model model = plain_model(small, torch::kFloat);
    model.root->to(device());
    const Tensor before = loss_and_gradients(model);
    clear_gradients(model);
    const int64_t count = parameter_count(model);
    add_lora(model, {.rank = 3});
    EXPECT_TRUE(has_lora(model));
    EXPECT_GT(parameter_count(model), count) << small.name;
    EXPECT_TRUE(same(before, loss_and_gradients(model))) << small.name;
    for (const auto& item : model.root->named_parameters()) {
      const bool adapter = detail::is_adapter_parameter(item.key());
      EXPECT_EQ(item.value().requires_grad(), adapter) << item.key();
      EXPECT_EQ(item.value().grad().defined(), adapter) << item.key();
      if (item.key().ends_with("lora_A.weight")) {
        const double bound = 1 / std::sqrt(double(item.value().size(1)));
        EXPECT_LE(item.value().abs().max().item<double>(), bound);
        EXPECT_GT(item.value().abs().max().item<double>(), bound / 2);
      }
    }
  }
}

/// The truth: a model without adapters whose weights are W + s B A. With G the gradient of
/// such a weight, the gradient of A is s Bᵀ G, and that of B is s G Aᵀ.
TEST(Lora, GradientsEqualThoseOfMergedWeights) {
  for (const SmallModel& small : adaptable()) {
    const LoraOptions options{.rank = 2, .alpha = 5};
    Model adapted = plain_model(small, torch::kDouble);
    add_lora(adapted, options);
    randomize_adapters(adapted);
    Model merged = plain_model(small, torch::kDouble);
    std::map<std::string, Tensor> weights;
    for (const auto& item : merged.root->named_parameters()) {
      weights[item.key()] = item.value();
    }
    const auto layers = detail::adapted_layers(adapted);
    ASSERT_FALSE(layers.empty()) << small.name;
    const bool in_out = small.name == "gpt2";
    const auto in_layout = [&](const Tensor& t) { return in_out ? t.t() : t; };
    {
      const torch::NoGradGuard no_grad;
      for (const auto& layer : layers) {
        const Tensor product =
            layer.adapter()->b->weight.mm(layer.adapter()->a->weight) * 2.5;
        weights.at(layer.name + ".weight").add_(in_layout(product));
      }
    }
    adapted.root->to(device());
    merged.root->to(device());
    const Tensor loss = loss_and_gradients(adapted);
    EXPECT_LT(relative_error(loss_and_gradients(merged), loss), 1e-6)
        << small.name;
    for (const auto& layer : layers) {
      const Tensor gradient =
          in_layout(weights.at(layer.name + ".weight").grad()) * 2.5;
      const Tensor a = layer.adapter()->a->weight;
      const Tensor b = layer.adapter()->b->weight;
      const torch::NoGradGuard no_grad;
      EXPECT_LT(relative_error(b.t().mm(gradient), a.grad()), 1e-5)
          << small.name << " " << layer.name;
      EXPECT_LT(relative_error(gradient.mm(a.t()), b.grad()), 1e-5)
          << small.name << " " << layer.name;
    }
    merge_lora(adapted);
    EXPECT_FALSE(has_lora(adapted));
    EXPECT_LT(relative_error(loss_and_gradients(adapted), loss), 1e-6)
        << small.name;
    for (const auto& item : adapted.root->named_parameters()) {
      EXPECT_TRUE(item.value().requires_grad()) << item.key();
      EXPECT_TRUE(
          torch::allclose(weights.at(item.key()), item.value(), 1e-9, 1e-12))
          << item.key();
    }
  }
}

/// A module that is not built in.
struct OwnNet : torch::nn::Module {
  OwnNet() {
    register_module("first", first);
    register_module("second", second);
  }
  Model model(const std::shared_ptr<OwnNet>& self) const {
    return {.name = "own",
            .root = self,
            .chain = Chain(
                {make_stage("first", first),
                 make_stage("second",
                            [self](const Tensor& x) {
                              return self->second(torch::tanh(x)).pow(2).sum();
                            },
                            {self->second.ptr()})})};
  }
  LoraLinear first{4, 5};
  LoraLinear second{torch::nn::LinearOptions(5, 3).bias(false)};
};

TEST(Lora, GradientsMatchFiniteDifferences) {
  torch::manual_seed(1);
  const auto net = std::make_shared<OwnNet>();
  net->to(torch::kDouble);
  Model model = net->model(net);
  add_lora(model, {.rank = 2, .alpha = 3, .targets = "second"});
  randomize_adapters(model);
  const Tensor x = torch::randn({2, 3, 4}, torch::kDouble);
  const auto loss = [&] {
    return model.chain.forward(x, make_schedule("none", 2));
  };
  loss().backward();
  int compared = 0;
  for (Tensor parameter : model.root->parameters()) {
    if (!parameter.requires_grad()) continue;
    const torch::NoGradGuard no_grad;
    Tensor flat = parameter.detach().view({-1});
    for (int64_t i = 0; i < flat.numel(); ++i) {
      constexpr double kStep = 1e-6;
      const double value = flat[i].item<double>();
      flat[i] = value + kStep;
      const double above = loss().item<double>();
      flat[i] = value - kStep;
      const double below = loss().item<double>();
      flat[i] = value;
      EXPECT_NEAR(parameter.grad().view({-1})[i].item<double>(),
                  (above - below) / (2 * kStep), 1e-6);
      ++compared;
    }
  }
  EXPECT_EQ(compared, 2 * 5 + 3 * 2);
}

TEST(Lora, TheFunctionEqualsItsFormula) {
  torch::manual_seed(1);
  const auto random = [](torch::IntArrayRef sizes) {
    return torch::randn(sizes, on_device(torch::kDouble)).requires_grad_();
  };
  const Tensor x = random({2, 3, 4}), w = random({5, 4}), bias = random({5});
  const Tensor a = random({2, 4}), b = random({5, 2});
  const Tensor y = lora_linear(x, w, bias, a, b, 0.7);
  const Tensor expected = torch::linear(x, w + 0.7 * b.mm(a), bias);
  EXPECT_LT(relative_error(expected, y), 1e-12);
  const auto of = [&](const Tensor& output) {
    return torch::autograd::grad(Tensors{output.pow(2).sum()},
                                 Tensors{x, w, bias, a, b});
  };
  const auto gradients = of(y), truth = of(expected);
  for (size_t i = 0; i < truth.size(); ++i) {
    EXPECT_LT(relative_error(truth[i], gradients[i]), 1e-12) << i;
  }
}

TEST(Lora, RecomputationIsExactWithDropout) {
  for (const char* name : {"llama-small", "qwen2.5-7b", "gpt2", "bert-base"}) {
    torch::manual_seed(1);
    Model model = make_model(name, small_one(name).options);
    add_lora(model, {.rank = 2, .dropout = 0.3});
    randomize_adapters(model);
    model.root->to(device());
    const auto results = [&](const char* strategy) {
      std::vector<Tensor> list = {loss_and_gradients(model, strategy)};
      for (const Tensor& parameter : model.root->parameters()) {
        if (parameter.requires_grad()) list.push_back(parameter.grad().clone());
      }
      clear_gradients(model);
      return list;
    };
    const auto kept = results("none");
    for (const char* strategy : {"sqrt", "all"}) {
      const auto again = results(strategy);
      ASSERT_EQ(kept.size(), again.size());
      for (size_t i = 0; i < kept.size(); ++i) {
        EXPECT_TRUE(same(kept[i], again[i])) << name << strategy << i;
      }
    }
    model.root->eval();  // no dropout
    EXPECT_TRUE(same(loss_and_gradients(model), loss_and_gradients(model)));
  }
}

/// Copies exist for trained weights only, and half precision works with and without them.
TEST(Lora, WorksInHalfPrecision) {
  compat::AutocastState half;
  half.cpu_enabled = device().is_cpu();
  half.cuda_enabled = device().is_cuda();
  half.cpu_dtype = half.cuda_dtype = torch::kBFloat16;
  for (const char* name : {"llama-small", "gpt2"}) {
    Model model = plain_model(small_one(name), torch::kFloat);
    add_lora(model, {.rank = 2});
    randomize_adapters(model);
    model.root->to(device());
    const Tensor expected = loss_and_gradients(model);
    clear_gradients(model);
    const WeightCopies copies(model.linear_parameters(), torch::kBFloat16);
    EXPECT_TRUE(copies.weights().empty());
    const compat::AutocastGuard autocast(half);
    EXPECT_LT(relative_error(expected, loss_and_gradients(model)), 0.02);
    for (const auto& item : model.root->named_parameters()) {
      EXPECT_EQ(item.value().grad().defined(), item.value().requires_grad());
    }
  }
}

TEST(Lora, TargetsSelectLayers) {
  const auto adapted = [](const std::string& targets) {
    Model model = plain_model(small_one("llama-3-8b"), torch::kFloat);
    add_lora(model, {.rank = 2, .targets = targets});
    std::set<std::string> names;
    for (const auto& layer : detail::adapted_layers(model)) {
      names.insert(layer.name);
    }
    return names;
  };
  EXPECT_EQ(adapted("q_proj, v_proj"),
            (std::set<std::string>{"model.layers.0.self_attn.q_proj",
                                   "model.layers.0.self_attn.v_proj",
                                   "model.layers.1.self_attn.q_proj",
                                   "model.layers.1.self_attn.v_proj"}));
  EXPECT_EQ(adapted("1.mlp.down_proj"),
            std::set<std::string>{"model.layers.1.mlp.down_proj"});
  EXPECT_EQ(adapted("").size(), 14u);  // not the output layer
  EXPECT_EQ(adapted("all-linear"), adapted(""));
}

TEST(Lora, ErrorsNameTheNearestLayer) {
  Model model = plain_model(small_one("llama-small"), torch::kFloat);
  const auto error = [&](const LoraOptions& options) {
    return error_of([&] { add_lora(model, options); });
  };
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  std::string text = error({.rank = 2, .targets = "q_proj,v_porj"});
  EXPECT_TRUE(has(text, "has no linear layer 'v_porj'; did you mean v_proj?"))
      << text;
  EXPECT_FALSE(has_lora(model));
  EXPECT_TRUE(model.root->parameters()[0].requires_grad());
  text = error({.rank = 2, .targets = "attention"});
  EXPECT_TRUE(has(text,
                  "expected some of q_proj, k_proj, v_proj, o_proj, "
                  "gate_proj, up_proj, down_proj, or all-linear"))
      << text;
  text = error({.rank = 0});
  EXPECT_TRUE(has(text, "expected a rank of at least 1, got 0")) << text;
  text = error_of([&] { merge_lora(model); });
  EXPECT_TRUE(has(text, "has no adapters")) << text;
  add_lora(model, {.rank = 2});
  text = error({.rank = 2});
  EXPECT_TRUE(has(text, "has adapters already")) << text;
  Model convolutions = plain_model(small_one("resnet18"), torch::kFloat);
  text = error_of([&] { add_lora(convolutions, {.rank = 2}); });
  EXPECT_TRUE(has(text, "no layer that can have an adapter")) << text;
}

nlohmann::json json_in(const std::string& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file);
}

TEST(Lora, FilesAreThoseOfPeft) {
  const TemporaryDirectory base;
  const std::string directory = base.path() + "/deep/adapter";
  Model model = plain_model(small_one("llama-small"), torch::kFloat);
  add_lora(
      model,
      {.rank = 2, .alpha = 16, .dropout = 0.1, .targets = "q_proj,v_proj"});
  randomize_adapters(model);
  save_lora(model, directory);
  const SafeTensors file(directory + "/adapter_model.safetensors");
  EXPECT_EQ(file.entries().size(), 8u);
  EXPECT_EQ(file.metadata().at("format"), "pt");
  const std::string layer = "base_model.model.model.layers.1.self_attn.";
  EXPECT_EQ(file.entries().at(layer + "q_proj.lora_A.weight").shape,
            (std::vector<int64_t>{2, 24}));
  EXPECT_EQ(file.entries().at(layer + "v_proj.lora_B.weight").shape,
            (std::vector<int64_t>{8, 2}));
  const auto config = json_in(directory + "/adapter_config.json");
  EXPECT_EQ(config["peft_type"], "LORA");
  EXPECT_EQ(config["task_type"], "CAUSAL_LM");
  EXPECT_EQ(config["r"], 2);
  EXPECT_EQ(config["lora_alpha"].dump(), "16");
  EXPECT_EQ(config["lora_dropout"], 0.1);
  EXPECT_EQ(config["target_modules"],
            (std::vector<std::string>{"q_proj", "v_proj"}));
  EXPECT_EQ(config["fan_in_fan_out"], false);

  Model other = plain_model(small_one("llama-small"), torch::kFloat);
  load_lora(other, directory);
  const auto a = model.root->named_parameters();
  const auto b = other.root->named_parameters();
  ASSERT_EQ(a.size(), b.size());
  for (const auto& item : a) {
    EXPECT_TRUE(torch::equal(item.value(), b[item.key()])) << item.key();
    EXPECT_EQ(item.value().requires_grad(), b[item.key()].requires_grad());
  }
  for (const Model* each : {&model, &other}) {
    each->root->to(device());
    each->root->eval();
  }
  EXPECT_TRUE(same(loss_and_gradients(model), loss_and_gradients(other)));

  Model wider = plain_model(small_one("qwen2.5-7b"), torch::kFloat);
  add_lora(wider, {.rank = 1});
  save_lora(wider, directory);  // replaces the files
  EXPECT_EQ(
      json_in(directory + "/adapter_config.json")["target_modules"].size(), 7u);
}

TEST(Lora, UnfitFilesAreRefused) {
  const TemporaryDirectory base;
  Model model = plain_model(small_one("gpt2"), torch::kFloat);
  add_lora(model, {.rank = 2, .targets = "c_attn"});
  save_lora(model, base.path());
  EXPECT_EQ(json_in(base.path() + "/adapter_config.json")["fan_in_fan_out"],
            true);
  const auto problem = [&](const SmallModel& small) {
    Model other = plain_model(small, torch::kFloat);
    return error_of([&] { load_lora(other, base.path()); });
  };
  const auto expect = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect(problem(small_one("llama-small")), "no linear layer 'c_attn'");
  SmallModel deeper = small_one("gpt2");
  deeper.options.depth = 3;
  expect(problem(deeper), "transformer.h.2.attn.c_attn.lora_A.weight', which");
  SmallModel wider = small_one("gpt2");
  wider.options.width = 32;
  expect(problem(wider), "has shape [2, 16], expected [2, 32]");
  const auto with = [&](const char* key, const nlohmann::json& value) {
    auto config = json_in(base.path() + "/adapter_config.json");
    const auto before = config.dump();
    config[key] = value;
    std::ofstream(base.path() + "/adapter_config.json") << config.dump();
    const std::string text = problem(small_one("gpt2"));
    std::ofstream(base.path() + "/adapter_config.json") << before;
    return text;
  };
  expect(with("use_dora", true), "use_dora is not supported");
  expect(with("rank_pattern", {{"c_attn", 4}}), "rank_pattern is not");
  expect(with("peft_type", "IA3"), "expected the configuration of a LoRA");
  expect(with("r", "two"), "expected r, a whole number from 1 to 65536");
  std::filesystem::remove(base.path() + "/adapter_model.safetensors");
  expect(problem(small_one("gpt2")), "adapter_model.safetensors");
}

TEST(Lora, ExportedWeightsAreMerged) {
  const TemporaryDirectory base;
  for (const char* name : {"llama-3-8b", "gpt2"}) {
    Model model = plain_model(small_one(name), torch::kFloat);
    add_lora(model, {.rank = 2});
    randomize_adapters(model);
    const std::string path = base.path() + "/weights.safetensors";
    export_weights(model, path);
    Model other = plain_model(small_one(name), torch::kFloat);
    load_weights(other, path);
    merge_lora(model);
    const auto a = model.root->named_parameters();
    const auto b = other.root->named_parameters();
    ASSERT_EQ(a.size(), b.size());
    for (const auto& item : a) {
      EXPECT_TRUE(torch::equal(item.value(), b[item.key()])) << item.key();
    }
    // Weights can be loaded below adapters.
    add_lora(other, {.rank = 2});
    load_weights(other, path);
    EXPECT_TRUE(has_lora(other));
  }
}

}  // namespace
}  // namespace reprise
