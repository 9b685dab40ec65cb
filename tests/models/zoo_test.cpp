#include "models/model_spec.h"
#include "ops/linear_layer.h"
#include "recompute/tied_gradients.h"
#include "small_models.h"
#include "support.h"

#include <reprise/models/model.h>
#include <reprise/ops/weight_copies.h>
#include <reprise/recompute/strategy.h>

#include <ATen/Parallel.h>

#include <cmath>
#include <set>
#include <tuple>

namespace reprise {
namespace {

using testing::device;
using testing::error_of;
using testing::same;
using testing::small_inputs;
using testing::small_models;
using testing::SmallModel;
using torch::Tensor;

void expect_error(const std::string& expected, const std::string& name,
                  const ModelOptions& options = {}) {
  const std::string text = error_of([&] { make_model(name, options); });
  EXPECT_NE(text.find(expected), std::string::npos) << text;
}

/// Loss and gradients after one forward and backward.
std::vector<Tensor> step(const Model& model, const Tensors& inputs,
                         const char* strategy) {
  std::vector<Tensor> buffers;
  for (const Tensor& buffer : model.root->buffers()) {
    buffers.push_back(buffer.clone());
  }
  torch::manual_seed(5);
  Execution execution(model.chain, make_schedule(strategy, model.chain.size()));
  const Tensor loss = execution.forward(inputs).at(0);
  execution.backward({torch::ones_like(loss)});
  auto results = testing::take_gradients(model.root->parameters());
  results.push_back(loss);
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < buffers.size(); ++i) {
    Tensor buffer = model.root->buffers()[i];
    results.push_back(buffer.clone());
    buffer.copy_(buffers[i]);
  }
  return results;
}

/// step() in bf16 with copies of the weights; also returns how many were split.
std::pair<std::vector<Tensor>, int> half_step(const Model& model,
                                              const Tensors& inputs,
                                              bool split) {
  WeightCopiesOptions options;
  options.split = split;
  for (const auto& tied : tied_parameters(model.chain)) {
    options.shared_weights.push_back(tied.parameter);
  }
  if (model.embeddings) options.embedding_tables = model.embeddings();
  const WeightCopies copies(model.linear_parameters(), torch::kBFloat16,
                            options);
  const compat::AutocastGuard autocast(testing::half());
  auto results = step(model, inputs, "all");
  int count = 0;
  for (const Tensor& weight : copies.weights()) {
    count += WeightCopies::is_split(weight) ? 1 : 0;
  }
  return {std::move(results), count};
}

TEST(Zoo, SplitWeightsChangeResultsByRoundingAlone) {
  int split = 0;
  for (const SmallModel& small : small_models()) {
    torch::manual_seed(1);
    const Model model = make_model(small.name, small.options);
    model.root->to(device());
    const Tensors inputs = small_inputs(model);
    std::vector<Tensor> values;
    for (const Tensor& parameter : model.root->parameters()) {
      values.push_back(parameter.detach().clone());
    }
    const auto wanted = half_step(model, inputs, false).first;
    const auto [got, count] = half_step(model, inputs, true);
    split += count;
    ASSERT_EQ(got.size(), wanted.size());
    for (size_t i = 0; i < wanted.size(); ++i) {
      // Rounding changes activations near 0, and with them whole gradients of ReLU.
      EXPECT_LT(testing::relative_error(got[i], wanted[i]), 0.05)
          << small.name << ", tensor " << i;
    }
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_TRUE(same(model.root->parameters()[i].detach(), values[i]))
          << small.name << ", parameter " << i;
    }
  }
  EXPECT_GT(split, 40);
}

TEST(Zoo, ListsEveryModelOnce) {
  std::set<std::string> names;
  for (const ModelInfo& info : model_list()) {
    EXPECT_TRUE(names.insert(info.name).second) << info.name;
    EXPECT_FALSE(info.description.empty());
  }
  std::set<std::string> tested;
  for (const SmallModel& small : small_models()) tested.insert(small.name);
  EXPECT_EQ(names, tested);
}

TEST(Zoo, RecomputationDoesNotChangeResults) {
  for (const SmallModel& small : small_models()) {
    torch::manual_seed(1);
    const Model model = make_model(small.name, small.options);
    model.root->to(device());
    const Tensors inputs = small_inputs(model);
    const auto kept = step(model, inputs, "none");
    for (const Tensor& tensor : kept) {
      ASSERT_TRUE(tensor.defined()) << small.name << ": no gradient";
      ASSERT_TRUE(tensor.isfinite().all().item<bool>()) << small.name;
    }
    for (const char* strategy : {"sqrt", "all"}) {
      const auto recomputed = step(model, inputs, strategy);
      ASSERT_EQ(recomputed.size(), kept.size());
      for (size_t i = 0; i < kept.size(); ++i) {
        EXPECT_TRUE(same(kept[i], recomputed[i]))
            << small.name << ", " << strategy << ", tensor " << i;
      }
    }
  }
}

TEST(Zoo, StagesHaveParametersOfRoot) {
  for (const SmallModel& small : small_models()) {
    const Model model = make_model(small.name, small.options);
    std::set<const void*> root;
    for (const Tensor& tensor : model.root->parameters()) {
      root.insert(tensor.unsafeGetTensorImpl());
    }
    std::set<const void*> chain;
    for (const Tensor& tensor : model.chain.parameters()) {
      chain.insert(tensor.unsafeGetTensorImpl());
    }
    EXPECT_EQ(root, chain) << small.name;
    EXPECT_EQ(model.root->buffers().size(), model.chain.buffers().size())
        << small.name;
    EXPECT_EQ(parameter_count(model), [&] {
      int64_t count = 0;
      for (const Tensor& tensor : model.chain.parameters()) {
        count += tensor.numel();
      }
      return count;
    }()) << small.name;
  }
}

TEST(Zoo, Float64ModelsHaveFloat32Loss) {
  for (const SmallModel& small : small_models()) {
    const Model model = make_model(small.name, small.options);
    model.root->to(device());
    model.root->to(torch::kDouble);
    Tensors inputs = small_inputs(model);
    if (inputs[0].is_floating_point()) inputs[0] = inputs[0].to(torch::kDouble);
    const auto results = step(model, inputs, "sqrt");
    const size_t parameters = model.root->parameters().size();
    EXPECT_EQ(results[parameters].scalar_type(), torch::kFloat) << small.name;
    for (size_t i = 0; i < parameters; ++i) {
      EXPECT_EQ(results[i].scalar_type(), torch::kDouble) << small.name;
    }
  }
}

// The shortcuts have another implementation for channels-last.
TEST(Zoo, ResnetInChannelsLast) {
  ModelOptions options;
  options.width = 4;
  options.image_size = 32;
  options.classes = 5;
  Model model = make_model("resnet18", options);
  model.root->to(device());
  model.root->to(torch::kDouble);
  model.root->train();
  torch::manual_seed(4);
  const auto at = torch::device(device());
  Tensors inputs = {torch::randn({6, 3, 32, 32}, at.dtype(torch::kDouble)),
                    torch::randint(5, {6}, at.dtype(torch::kLong))};
  const auto planes = step(model, inputs, "none");
  inputs[0] = inputs[0].contiguous(at::MemoryFormat::ChannelsLast);
  const auto last = step(model, inputs, "none");
  ASSERT_EQ(planes.size(), last.size());
  for (size_t i = 0; i < planes.size(); ++i) {
    EXPECT_TRUE(torch::allclose(last[i], planes[i], 1e-9, 1e-9)) << i;
  }
}

TEST(Zoo, EvaluationCountsCorrectPredictions) {
  for (const SmallModel& small : small_models()) {
    const Model model = make_model(small.name, small.options);
    model.root->to(device());
    Tensors inputs = small_inputs(model);
    model.root->eval();
    const torch::NoGradGuard no_grad;
    const auto schedule = make_schedule("none", model.chain.size());
    auto out = model.chain.forward(inputs, schedule);
    ASSERT_EQ(out.size(), 2u) << small.name;
    EXPECT_EQ(out[0].scalar_type(), torch::kFloat);
    const double correct = out[1].item<double>();
    const double most = static_cast<double>(
        model.task == Task::kLanguage ? inputs[1].ge(0).sum().item<int64_t>()
                                      : inputs[1].size(0));
    EXPECT_GE(correct, 0) << small.name;
    EXPECT_LE(correct, most) << small.name;
    // Each prediction is correct for exactly one class as the target.
    const int64_t classes = model.task == Task::kLanguage
                                ? model.options.vocab
                                : model.options.classes;
    double total = 0;
    const Tensor ignored = inputs[1].lt(0);
    for (int64_t c = 0; c < classes; ++c) {
      inputs[1] = torch::full_like(inputs[1], c).masked_fill(ignored, -100);
      total += model.chain.forward(inputs, schedule)[1].item<double>();
    }
    EXPECT_NEAR(total, most, 1e-6) << small.name;
    // Chain::train() has the effect of root->train().
    model.chain.train();
    EXPECT_EQ(model.chain.forward(inputs, schedule).size(), 1u) << small.name;
  }
}

TEST(Zoo, PixelLossIsSumOfMeans) {
  ModelOptions options;
  options.depth = 1;
  options.width = 4;
  options.image_size = 4;
  const Model model = make_model("unet", options);
  model.root->to(device());
  const Tensors inputs = small_inputs(model);
  // With all scores zero, each pixel has loss log(classes).
  const torch::NoGradGuard no_grad;
  for (const auto& item : model.root->named_parameters()) {
    if (item.key().starts_with("head.")) Tensor(item.value()).zero_();
  }
  const auto out =
      model.chain.forward(inputs, make_schedule("none", model.chain.size()));
  EXPECT_NEAR(out[0].item<double>(),
              static_cast<double>(inputs[0].size(0)) * std::log(11.0), 1e-4);
}

TEST(Zoo, IgnoredTokensHaveNoLoss) {
  ModelOptions options;
  options.depth = 1;
  options.width = 8;
  options.vocab = 5;
  options.seq = 4;
  options.dropout = 0;
  const Model model = make_model("gpt2", options);
  model.root->to(device());
  const auto schedule = make_schedule("none", model.chain.size());
  const Tensor x = torch::randint(5, {2, 4}, testing::on_device(torch::kLong));
  const Tensor whole =
      torch::randint(5, {2, 4}, testing::on_device(torch::kLong));
  const auto loss = [&](const Tensor& targets) {
    return model.chain.forward(Tensors{x, targets}, schedule)[0].item<double>();
  };
  double sum = 0;
  for (int64_t t = 0; t < 4; ++t) {
    Tensor one = torch::full_like(whole, -100);
    one.select(1, t).copy_(whole.select(1, t));
    sum += loss(one);
  }
  EXPECT_NEAR(sum, loss(whole), 1e-4);
  EXPECT_EQ(loss(torch::full_like(whole, -100)), 0);
}

TEST(Zoo, RejectsUnknownNames) {
  expect_error("unknown model 'gpt'; did you mean gpt2?", "gpt");
  expect_error("unknown model 'resnet5'; did you mean resnet50?", "resnet5");
  expect_error("expected one of mlp, cnn-basic", "transformer-of-mine");
}

TEST(Zoo, RejectsOptionsOfOtherModels) {
  ModelOptions options;
  options.norm = "batch";
  expect_error(
      "[model gpt2] has no option norm; it has depth, width, heads, vocab, "
      "seq, dropout",
      "gpt2", options);
  options = {};
  options.seq = 5;
  expect_error("[model resnet18] has no option seq", "resnet18", options);
  options = {};
  options.dropout = 0;
  expect_error("[model unet] has no option dropout", "unet", options);
}

TEST(Zoo, RejectsOptionsOutOfRange) {
  ModelOptions options;
  options.depth = -1;
  expect_error("[model mlp] expected a positive depth, got -1", "mlp", options);
  options = {};
  options.dropout = 1;
  expect_error("dropout from 0 to below 1", "mlp", options);
  options = {};
  options.norm = "layer";
  expect_error("expected norm batch or group, got 'layer'", "cnn-basic",
               options);
  options = {};
  options.width = 100;
  options.heads = 3;
  expect_error("multiple of its 3 heads, got 100", "gpt2", options);
  options = {};
  options.kv_heads = 3;
  expect_error("expected kv-heads that divide its 8 heads, got 3",
               "llama-small", options);
  expect_error("[model gpt2] has no option kv-heads", "gpt2", options);
  options = {};
  options.width = 15;
  options.heads = 5;
  expect_error("expected an even width per head, got 15 for 5 heads",
               "llama-small", options);
}

TEST(Zoo, RejectsUnsupportedImageSizes) {
  ModelOptions options;
  options.image_size = 100;
  expect_error(
      "[model cnn-basic] cannot take image size 100; it can take 28, 56, 112, "
      "224, 448, 896, 1792, 3584",
      "cnn-basic", options);
  expect_error("it can take multiples of 16", "vit-b-16", options);
  expect_error("it can take multiples of 16", "unet", options);
  options.image_size = 31;
  expect_error("it can take 32 and more", "vgg16", options);
  expect_error("it can take even ones", "cnn-profile", options);
}

TEST(Zoo, RejectsLongSequences) {
  ModelOptions options;
  options.depth = 1;
  options.width = 8;
  options.vocab = 5;
  options.seq = 4;
  for (const char* name : {"gpt2", "bert-base", "llama-small"}) {
    const Model model = make_model(name, options);
    const Tensor x = torch::zeros({1, 5}, torch::kLong);
    const std::string text = error_of([&] {
      model.chain.forward(Tensors{x, x},
                          make_schedule("none", model.chain.size()));
    });
    EXPECT_NE(text.find("T at most 4, got [1, 5]; set seq"), std::string::npos)
        << text;
  }
}

TEST(Zoo, CnnBasicSupportsAllSizes) {
  int convolutions = 5;
  for (int64_t size = 28; size <= 3584; size *= 2, ++convolutions) {
    ModelOptions options;
    options.image_size = size;
    const Model model = make_model("cnn-basic", options);
    EXPECT_EQ(model.chain.size(), convolutions + 3) << size;
    if (size > 224) continue;
    const Tensor x = torch::randn({2, 1, size, size});
    const Tensor targets = torch::zeros({2}, torch::kLong);
    model.chain.forward(Tensors{x, targets},
                        make_schedule("none", model.chain.size()));
  }
}

TEST(Zoo, DefaultsAndHeads) {
  ModelOptions options;
  options.width = 128;
  options.depth = 1;
  EXPECT_EQ(make_model("gpt2", options).options.heads, 2);
  options.vocab = 8;
  // As the originals: heads of 128 channels, three of which share keys and values.
  const ModelOptions llama = make_model("llama-3.2-3b", options).options;
  EXPECT_EQ(llama.heads, 1);
  EXPECT_EQ(llama.kv_heads, 1);
  EXPECT_EQ(llama.mlp_width, 128 * 8192 / 3072);
  options.heads = 8;
  EXPECT_EQ(make_model("llama-3.2-3b", options).options.kv_heads, 2);
  EXPECT_EQ(make_model("cnn-profile").chain.size(), 26);
  EXPECT_EQ(make_model("cnn-blocks").chain.size(), 8);
  const Model mlp = make_model("mlp");
  EXPECT_EQ(mlp.options.width, 512);
  EXPECT_EQ(mlp.options.depth, 4);
  EXPECT_EQ(mlp.options.dropout, 0);
  EXPECT_EQ(mlp.options.vocab, 0);
}

TEST(Zoo, ParameterCountsMatchOriginals) {
  const std::pair<const char*, int64_t> known[] = {
      {"cnn-blocks", 98'282},    {"mlp", 1'195'018},
      {"gpt2", 124'439'808},     {"bert-base", 109'483'778},
      {"resnet18", 11'689'512},  {"resnet50", 25'557'032},
      {"resnet101", 44'549'160}, {"vgg16", 138'357'544},
      {"vit-b-16", 86'567'656}};
  for (const auto& [name, count] : known) {
    EXPECT_EQ(parameter_count(make_model(name)), count) << name;
  }
}

TEST(Zoo, ParameterCountsOfLargeModelsMatchOriginals) {
  // Computed from one and two blocks: each block adds the same number.
  const auto count = [](const char* name, int64_t depth) {
    ModelOptions options;
    options.depth = depth;
    return parameter_count(make_model(name, options));
  };
  const std::tuple<const char*, int64_t, int64_t> known[] = {
      {"gpt2-medium", 24, 354'823'168},
      {"gpt2-large", 36, 774'030'080},
      {"gpt2-xl", 48, 1'557'611'200},
      {"bert-large", 24, 335'143'938},
      {"vit-l-16", 24, 304'326'632}};
  for (const auto& [name, depth, expected] : known) {
    const int64_t one = count(name, 1);
    EXPECT_EQ(one + (depth - 1) * (count(name, 2) - one), expected) << name;
  }
}

TEST(Zoo, LlamasMatchPublishedSizes) {
  struct Published {
    const char* name;
    int64_t depth, width, mlp_width, heads, kv_heads, vocab, parameters;
  };
  // The published sizes.
  const Published all[] = {
      {"llama-2-7b", 32, 4096, 11008, 32, 32, 32000, 6'738'415'616},
      {"llama-3.2-1b", 16, 2048, 8192, 32, 8, 128256, 1'235'814'400},
      {"llama-3.2-3b", 28, 3072, 8192, 24, 8, 128256, 3'212'749'824},
      {"llama-3-8b", 32, 4096, 14336, 32, 8, 128256, 8'030'261'248},
      {"qwen2.5-0.5b", 24, 896, 4864, 14, 2, 151936, 494'032'768},
      {"qwen2.5-1.5b", 28, 1536, 8960, 12, 2, 151936, 1'543'714'304},
      {"qwen2.5-7b", 28, 3584, 18944, 28, 4, 152064, 7'615'616'512}};
  for (const Published& p : all) {
    const ModelOptions& defaults = detail::find_model_spec(p.name)->defaults;
    EXPECT_EQ(defaults.depth, p.depth) << p.name;
    EXPECT_EQ(defaults.width, p.width) << p.name;
    EXPECT_EQ(defaults.mlp_width, p.mlp_width) << p.name;
    EXPECT_EQ(defaults.heads, p.heads) << p.name;
    EXPECT_EQ(defaults.kv_heads, p.kv_heads) << p.name;
    EXPECT_EQ(defaults.vocab, p.vocab) << p.name;
    // The count is linear in the vocabulary, and in the width of the feed-forward layers
    // for each block.
    const auto count = [&](int64_t depth, int64_t mlp_width, int64_t vocab) {
      ModelOptions options;
      options.depth = depth;
      options.mlp_width = mlp_width;
      options.vocab = vocab;
      return parameter_count(make_model(p.name, options));
    };
    const int64_t one = count(1, 1, 1);
    const int64_t per_row = count(1, 1, 2) - one;
    const int64_t per_channel = count(1, 2, 1) - one;
    const int64_t per_block =
        count(2, 1, 1) - one + (p.mlp_width - 1) * per_channel;
    EXPECT_EQ(one + (p.vocab - 1) * per_row + (p.mlp_width - 1) * per_channel +
                  (p.depth - 1) * per_block,
              p.parameters)
        << p.name;
  }
}

/// Large weights are filled by all threads, each block from a generator of its own.
TEST(Zoo, InitialWeightsDoNotDependOnTheThreads) {
  ModelOptions options;
  options.depth = 1;
  options.width = 64;
  options.heads = 2;
  options.seq = 8;
  options.vocab = 40'000;
  const auto table = [&](int threads, uint64_t seed) {
    const int before = at::get_num_threads();
    at::set_num_threads(threads);
    torch::manual_seed(seed);
    const auto model = make_model("gpt2", options);
    at::set_num_threads(before);
    return model.root->named_parameters()["transformer.wte.weight"].detach();
  };
  const Tensor one = table(1, 3);
  EXPECT_TRUE(same(table(2, 3), one));
  EXPECT_FALSE(same(table(1, 4), one));
  const int64_t block = int64_t{1} << 16;
  const Tensor flat = one.view(-1);
  EXPECT_FALSE(same(flat.narrow(0, 0, block), flat.narrow(0, block, block)));
  EXPECT_NEAR(flat.mean().item<double>(), 0, 1e-4);
  EXPECT_NEAR(flat.std().item<double>(), 0.02, 1e-4);
}

}  // namespace
}  // namespace reprise
