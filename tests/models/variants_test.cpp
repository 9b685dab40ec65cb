#include "compat/autocast.h"
#include "small_models.h"
#include "support.h"

#include <reprise/memory/meter.h>
#include <reprise/models/model.h>
#include <reprise/ops/linear.h>
#include <reprise/ops/weight_copies.h>
#include <reprise/plan/solver.h>
#include <reprise/recompute/stage_costs.h>
#include <reprise/recompute/strategy.h>

#include <torch/optim/sgd.h>

#include <algorithm>
#include <map>
#include <string>

namespace reprise {
namespace {

using testing::device;
using testing::on_device;
using testing::relative_error;
using testing::same;
using testing::same_in_parts;
using testing::small_inputs;
using testing::small_models;
using testing::SmallModel;
using torch::Tensor;

/// Keeps everything; each stage runs as its variant `number`, or its last one.
Schedule keep_all_as(const Chain& chain, int number) {
  std::vector<Op> ops;
  for (int i = 0; i < chain.size(); ++i) {
    const int count = static_cast<int>(chain[i].variants().size());
    ops.push_back({OpKind::kForwardKeep, i, std::min(number, count)});
  }
  for (int i = chain.size() - 1; i >= 0; --i) {
    ops.push_back({OpKind::kBackward, i});
  }
  return Schedule("variant " + std::to_string(number), chain.size(), ops);
}

/// Recomputes every stage but the last, as its variant `number` or its last one.
Schedule recompute_as(const Chain& chain, int number) {
  std::vector<Op> ops = make_schedule("all", chain.size()).ops();
  for (Op& op : ops) {
    if (op.kind != OpKind::kForwardKeep) continue;
    const int count = static_cast<int>(chain[op.stage].variants().size());
    op.variant = std::min(number, count);
  }
  return Schedule("recompute " + std::to_string(number), chain.size(), ops);
}

int most_variants(const Chain& chain) {
  size_t most = 0;
  for (int i = 0; i < chain.size(); ++i) {
    most = std::max(most, chain[i].variants().size());
  }
  return static_cast<int>(most);
}

/// Losses, parameters and buffers after three updates, with the forwards under `autocast`.
/// The updates run outside of it, since autocast caches converted weights while it is on.
std::vector<Tensor> train(const SmallModel& small, auto&& schedule_of,
                          const compat::AutocastState& autocast = {}) {
  torch::manual_seed(1);
  const Model model = make_model(small.name, small.options);
  model.root->to(device());
  const Tensors inputs = small_inputs(model);
  torch::optim::SGD optimizer(model.root->parameters(),
                              torch::optim::SGDOptions(0.01).momentum(0.9));
  Execution execution(model.chain, schedule_of(model.chain));
  std::vector<Tensor> results;
  for (int update = 0; update < 3; ++update) {
    Tensor loss;
    {
      const compat::AutocastGuard guard(autocast);
      loss = execution.forward(inputs).at(0);
    }
    execution.backward({torch::full_like(loss, 1 / 3.0)});
    results.push_back(loss);
    optimizer.step();
    testing::take_gradients(model.root->parameters());
  }
  for (const Tensor& tensor : model.root->parameters()) {
    results.push_back(tensor.detach().clone());
  }
  for (const Tensor& tensor : model.root->buffers()) {
    results.push_back(tensor.clone());
  }
  return results;
}

Schedule plainly(const Chain& chain) {
  return keep_all_as(chain, 0);
}

TEST(Variants, DoNotChangeTraining) {
  std::map<std::string, int> found;
  for (const SmallModel& small : small_models()) {
    const int most = most_variants(make_model(small.name, small.options).chain);
    found[small.name] = most;
    if (most == 0) continue;
    const auto expected = train(small, plainly);
    for (int number = 1; number <= most; ++number) {
      for (const auto make : {keep_all_as, recompute_as}) {
        const auto got = train(
            small, [&](const Chain& chain) { return make(chain, number); });
        ASSERT_EQ(got.size(), expected.size());
        for (size_t i = 0; i < got.size(); ++i) {
          EXPECT_TRUE(same(expected[i], got[i]))
              << small.name << ", variant " << number << ", tensor " << i;
        }
      }
    }
  }
  for (const char* name :
       {"cnn-blocks", "cnn-profile", "vgg16", "resnet18", "unet"}) {
    EXPECT_EQ(found[name], 1) << name;
  }
  for (const char* name :
       {"gpt2", "bert-base", "llama-small", "qwen2.5-7b", "vit-b-16"}) {
    EXPECT_EQ(found[name], 2) << name;
  }
}

TEST(Variants, DoNotChangeTrainingUnderAutocast) {
  compat::AutocastState state;
  state.cpu_enabled = state.cuda_enabled = true;
  state.cuda_dtype = torch::kBFloat16;
  for (const SmallModel& small : small_models()) {
    const int most = most_variants(make_model(small.name, small.options).chain);
    // On the CPU autocast supports no pools and few norms in half precision.
    if (most < 2) continue;
    const auto expected = train(small, plainly, state);
    for (int number = 1; number <= most; ++number) {
      const auto got = train(
          small, [&](const Chain& chain) { return keep_all_as(chain, number); },
          state);
      for (size_t i = 0; i < got.size(); ++i) {
        // The padded matrix products of the head may round differently.
        EXPECT_LE(relative_error(expected[i], got[i]), 1e-3)
            << small.name << ", variant " << number << ", tensor " << i;
      }
    }
  }
}

SmallModel language() {
  SmallModel small{"gpt2", {}};
  small.options.depth = 3;
  small.options.width = 32;
  small.options.heads = 2;
  // Several chunks; they are larger on a GPU.
  small.options.vocab = device().is_cpu() ? 10000 : 50000;
  small.options.seq = 128;
  return small;
}

Tensors language_inputs(const Model& model, int64_t batch) {
  return {torch::randint(model.options.vocab, {batch, model.options.seq},
                         on_device(torch::kLong)),
          torch::randint(model.options.vocab, {batch, model.options.seq},
                         on_device(torch::kLong))};
}

/// The costs without variants.
ChainCosts without_variants(ChainCosts figures) {
  for (StageCosts& stage : figures.stages) stage.variants.clear();
  return figures;
}

TEST(Variants, SeveralChunksMatchWholeScores) {
  // 8 × 128 rows: three chunks of rows, and of columns.
  torch::manual_seed(1);
  const SmallModel small = language();
  const Model model = make_model(small.name, small.options);
  model.root->to(device());
  const Tensors inputs = language_inputs(model, 8);
  const auto run = [&](int number) {
    torch::manual_seed(2);
    Execution execution(model.chain, keep_all_as(model.chain, number));
    const Tensor loss = execution.forward(inputs).at(0);
    execution.backward({torch::full_like(loss, 1 / 3.0)});
    auto results = testing::take_gradients(model.root->parameters());
    results.push_back(loss);
    return results;
  };
  const auto expected = run(0);
  const auto got = run(1);
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(same_in_parts(expected[i], got[i])) << i;
  }
  // Without gradients the stage itself uses chunks.
  model.root->eval();
  const torch::NoGradGuard no_grad;
  const auto schedule = plainly(model.chain);
  const Tensors chunked = model.chain.forward(inputs, schedule);
  Tensors whole;
  {
    const torch::AutoGradMode grad(true);
    whole = model.chain.forward(inputs, schedule);
  }
  EXPECT_TRUE(same_in_parts(whole.at(0), chunked.at(0)));
  EXPECT_EQ(whole.at(1).item<double>(), chunked.at(1).item<double>());
}

TEST(Variants, EvaluationNeverHoldsAllScores) {
  const SmallModel small = language();
  const Model model = make_model(small.name, small.options);
  model.root->to(device());
  model.root->eval();
  const Tensors inputs = language_inputs(model, 16);
  const torch::NoGradGuard no_grad;
  const auto schedule = plainly(model.chain);
  model.chain.forward(inputs, schedule);
  MemoryMeter meter(device());
  model.chain.forward(inputs, schedule);
  EXPECT_LT(meter.peak_increase_bytes(), 16 * 128 * small.options.vocab * 4);
}

TEST(Variants, PlannerUsesCosts) {
  torch::manual_seed(1);
  const SmallModel small = language();
  const Model model = make_model(small.name, small.options);
  model.root->to(device());
  const Tensors inputs = language_inputs(model, 16);
  const ChainCosts figures = measure_stage_costs(model.chain, inputs);
  const int64_t scores = 16 * 128 * small.options.vocab * 4;
  const StageCosts& head = figures.stages.back();
  ASSERT_EQ(head.variants.size(), 1u);
  EXPECT_GE(head.saved_bytes, scores);
  EXPECT_LT(head.variants[0].saved_bytes, scores / 1000);
  EXPECT_GT(head.backward_extra_bytes, scores * 19 / 10);
  EXPECT_LT(head.variants[0].backward_extra_bytes, scores);

  const StageCosts& block = figures.stages.at(1);
  ASSERT_EQ(block.variants.size(), 2u);
  // Without the input, which all of them keep; see docs/ops.md.
  EXPECT_LT(block.variants[0].saved_bytes, block.saved_bytes * 9 / 10);
  EXPECT_LT(block.variants[1].saved_bytes, block.variants[0].saved_bytes);

  const Solver with(figures);
  const Solver without(without_variants(figures));
  // On the CPU: 49 MiB and 235 MiB.
  EXPECT_LT(with.smallest_bytes(), without.smallest_bytes() / 3);
  const auto solution = with.solve(without.smallest_bytes() / 2);
  ASSERT_TRUE(solution);
  const std::string text = solution->schedule.to_text();
  EXPECT_NE(text.find("K5.1"), std::string::npos) << text;

  // The execution has the peak that the simulation predicts.
  Execution execution(model.chain, solution->schedule);
  const auto step = [&] {
    const Tensor loss = execution.forward(inputs).at(0);
    execution.backward({torch::ones_like(loss)});
  };
  step();  // allocates the gradients
  MemoryMeter meter(device());
  step();
  EXPECT_NEAR(double(meter.peak_increase_bytes()) /
                  double(solution->simulation.peak_bytes),
              1, 0.03);
}

TEST(Variants, LlamaBlocksSaveLess) {
  torch::manual_seed(1);
  ModelOptions options;
  options.depth = 1;
  options.width = 64;
  options.heads = 4;
  options.kv_heads = 2;
  options.mlp_width = 96;
  options.seq = 32;
  const Model model = make_model("llama-small", options);
  model.root->to(device());
  constexpr int64_t kBatch = 4;
  const Tensors inputs =
      random_batch(model.task, model.options, kBatch, device());
  const ChainCosts figures = measure_stage_costs(model.chain, inputs);
  const StageCosts& block = figures.stages.at(1);
  ASSERT_EQ(block.variants.size(), 2u);
  // Without the input: per token, queries, keys and values (64 + 2 · 32), the stream after
  // the attention and two inverse norms, gate and up (2 · 96), in float32.
  const int64_t tokens = kBatch * options.seq;
  const int64_t attention_again = tokens * 4 * (128 + 64 + 2 + 192);
  EXPECT_NEAR(double(block.variants[1].saved_bytes), double(attention_again),
              0.02 * double(attention_again));
  // Two results of norms and that of the activation.
  const int64_t pointwise = tokens * 4 * (64 + 64 + 96);
  EXPECT_NEAR(double(block.saved_bytes - block.variants[0].saved_bytes),
              double(pointwise), 0.02 * double(pointwise));
}

TEST(Variants, WeightCopiesDoNotChangeLlama) {
  // With copies in float32 the operators add the gradients of weights directly, and packed
  // layers are one matrix product.
  std::vector<SmallModel> llamas;
  for (const SmallModel& small : small_models()) {
    if (small.name != "llama-small" && small.name != "qwen2.5-7b") continue;
    llamas.push_back(small);
    // With sizes that the CUDA kernels for heads and activations support.
    SmallModel wide = small;
    wide.options.width = 64;
    wide.options.heads = 4;
    wide.options.mlp_width = 96;
    llamas.push_back(wide);
  }
  for (const SmallModel& small : llamas) {
    torch::manual_seed(1);
    const Model model = make_model(small.name, small.options);
    model.root->to(device());
    const Tensors inputs = small_inputs(model);
    const auto run = [&](int number) {
      // The head's variant adds to a tied gradient in another order.
      std::vector<Op> ops = keep_all_as(model.chain, number).ops();
      for (Op& op : ops) {
        if (op.stage == model.chain.size() - 1) op.variant = 0;
      }
      Execution execution(model.chain,
                          Schedule("blocks", model.chain.size(), ops));
      for (int i = 0; i < 2; ++i) {
        const Tensor loss = execution.forward(inputs).at(0);
        execution.backward({torch::full_like(loss, 1 / 3.0)});
      }
      return testing::take_gradients(model.root->parameters());
    };
    const auto expected = run(0);
    for (const auto& group : model.packed_groups()) {
      ops::pack_contiguous(group);
    }
    WeightCopiesOptions options;
    if (model.embeddings) options.embedding_tables = model.embeddings();
    const WeightCopies copies(model.linear_parameters(), torch::kFloat,
                              options);
    const auto direct = run(0);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_LE(relative_error(expected[i], direct[i]), 1e-5)
          << small.name << " " << i;
    }
    for (int number = 1; number <= 2; ++number) {
      const auto got = run(number);
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_TRUE(same(direct[i], got[i])) << small.name << " " << i;
      }
    }
  }
}

TEST(Variants, FeedForwardLayersWithCopiesInHalfPrecision) {
  compat::AutocastState half;
  half.cpu_enabled = half.cuda_enabled = true;
  half.cpu_dtype = half.cuda_dtype = torch::kBFloat16;
  for (SmallModel small : small_models()) {
    if (small.name != "gpt2" && small.name != "bert-base" &&
        small.name != "vit-b-16") {
      continue;
    }
    small.options.dropout = 0;
    torch::manual_seed(1);
    const Model model = make_model(small.name, small.options);
    model.root->to(device());
    const Tensors inputs = small_inputs(model);
    const auto run = [&](int number) {
      Execution execution(model.chain, keep_all_as(model.chain, number));
      for (int i = 0; i < 2; ++i) {
        Tensor loss;
        {
          const compat::AutocastGuard guard(half);
          loss = execution.forward(inputs).at(0);
        }
        execution.backward({torch::full_like(loss, 1 / 3.0)});
      }
      return testing::take_gradients(model.root->parameters());
    };
    const auto expected = run(0);
    const WeightCopies copies(model.linear_parameters(), torch::kBFloat16);
    const auto names = model.root->named_parameters().keys();
    int layers = 0;
    for (int number = 0; number <= 2; ++number) {
      const auto got = run(number);
      for (size_t i = 0; i < got.size(); ++i) {
        // Of the feed-forward layers only: others have gradients that should be zero.
        const std::string& name = names[i];
        const bool feeds = name.find("mlp") != std::string::npos ||
                           name.find("intermediate") != std::string::npos;
        if (!feeds) continue;
        ++layers;
        ASSERT_TRUE(got[i].defined()) << small.name << " " << name;
        EXPECT_LE(relative_error(expected[i], got[i]), 0.05)
            << small.name << " " << name << ", variant " << number;
      }
    }
    EXPECT_GT(layers, 0) << small.name;
  }
}

TEST(Variants, RecomputingNormsSavesLess) {
  torch::manual_seed(1);
  for (const SmallModel& small : small_models()) {
    if (small.name != "resnet18" && small.name != "resnet50") continue;
    const Model model = make_model(small.name, small.options);
    model.root->to(device());
    const ChainCosts figures =
        measure_stage_costs(model.chain, small_inputs(model));
    const StageCosts& block = figures.stages.at(2);
    ASSERT_EQ(block.variants.size(), 1u);
    // Saves the outputs of two convolutions but not of the ReLU between them; or of three
    // convolutions, the last with four times the channels, but not of two ReLUs.
    const double share = small.name == "resnet18" ? 2 / 3. : 6 / 8.;
    // The variant also keeps copies of the norms' buffers.
    int64_t buffers = 0;
    for (const auto& module : model.chain[2].modules()) {
      for (const auto& buffer : module->buffers()) {
        buffers += allocated_bytes(static_cast<int64_t>(buffer.nbytes()),
                                   buffer.device());
      }
    }
    EXPECT_NEAR(double(block.variants[0].saved_bytes - buffers),
                share * double(block.saved_bytes),
                0.1 * double(block.saved_bytes))
        << small.name;
  }
}

TEST(Variants, ReluAndGeluNeedNoVariant) {
  // LibTorch saves the output of ReLU and the input of GELU, which adjacent layers save too.
  const Tensor leaf = torch::randn({64, 64}, on_device()).requires_grad_();
  const auto kept_by = [&](const Tensor& x, auto&& run) {
    KeptMeter kept;
    const KeptMeter::Scope scope(kept, 0);
    const Tensor y = run(x);
    std::vector<const void*> storages;
    for (const auto& s : kept.live_storages()) storages.push_back(s.storage);
    return std::pair(y, storages);
  };
  const Tensor x = leaf * 1;
  const auto address = [](const Tensor& t) -> const void* {
    return t.storage().unsafeGetStorageImpl();
  };
  const auto relu = kept_by(x, [](const Tensor& t) { return torch::relu(t); });
  EXPECT_EQ(relu.second, std::vector<const void*>{address(relu.first)});
  const auto gelu = kept_by(x, [](const Tensor& t) { return torch::gelu(t); });
  EXPECT_EQ(gelu.second, std::vector<const void*>{address(x)});
}

TEST(Variants, CompactPoolsSaveLess) {
  for (const SmallModel& small : small_models()) {
    const std::map<std::string, const char*> stages = {
        {"vgg16", "features.2"},
        {"resnet18", "stem"},
        {"unet", "down0.second"},
        {"cnn-blocks", "block0"},
        {"cnn-profile", "pool10"}};
    const auto wanted = stages.find(small.name);
    if (wanted == stages.end()) continue;
    const Model model = make_model(small.name, small.options);
    model.root->to(device());
    const ChainCosts figures =
        measure_stage_costs(model.chain, small_inputs(model));
    bool found = false;
    for (int i = 0; i < model.chain.size(); ++i) {
      if (model.chain[i].name() != wanted->second) continue;
      found = true;
      const StageCosts& stage = figures.stages.at(static_cast<size_t>(i));
      ASSERT_EQ(stage.variants.size(), 1u) << small.name;
      const StageCosts::Variant& compact = stage.variants[0];
      if (small.name == "vgg16") {
        // One byte per output instead of the output of the ReLU and an 8-byte index.
        EXPECT_LE(compact.saved_bytes, stage.saved_bytes / 24 + 1024);
      } else if (small.name == "cnn-blocks" && device().is_cuda()) {
        // The stage itself saves as little on CUDA.
        EXPECT_LE(compact.saved_bytes, stage.saved_bytes);
      } else {
        EXPECT_LT(compact.saved_bytes, stage.saved_bytes);
      }
    }
    EXPECT_TRUE(found) << small.name;
  }
}

}  // namespace
}  // namespace reprise
