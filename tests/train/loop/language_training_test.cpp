#include "models/lora_adapter.h"
#include "train/runs.h"

#include <reprise/models/lora.h>
#include <reprise/train/planning.h>

/// Trainings of language models with segments, and of adapters.
namespace reprise {
namespace {

using testing::expect_same;
using testing::same;
using testing::TemporaryDirectory;

constexpr int64_t kRows = 24;
constexpr int64_t kTokens = 48;
constexpr int64_t kVocab = 61;

/// Rows of two documents and padding.
class PackedRows final : public Dataset {
 public:
  PackedRows() {
    torch::manual_seed(11);
    tokens_ = torch::randint(kVocab, {kRows, kTokens}, torch::kLong);
    targets_ = torch::randint(kVocab, {kRows, kTokens}, torch::kLong);
    segments_ = torch::ones({kRows, kTokens}, torch::kLong);
    for (int64_t i = 0; i < kRows; ++i) {
      segments_[i].narrow(0, 10 + i % 7, kTokens - 10 - i % 7).fill_(2);
      segments_[i].narrow(0, kTokens - i % 5, i % 5).fill_(0);
    }
    targets_.masked_fill_(segments_.eq(0), -100);
  }
  int64_t size() const override { return kRows; }
  int64_t count(int64_t i) const override { return kTokens - i % 5; }
  Batch get(const std::vector<int64_t>& indices) const override {
    const auto list = torch::tensor(indices);
    Batch batch{.tensors = {tokens_.index_select(0, list),
                            targets_.index_select(0, list),
                            segments_.index_select(0, list)},
                .samples = static_cast<int64_t>(indices.size())};
    for (const int64_t i : indices) batch.count += count(i);
    return batch;
  }
  std::string description() const override { return "packed rows"; }

 private:
  torch::Tensor tokens_, targets_, segments_;
};

ModelOptions llama_sizes() {
  ModelOptions options;
  options.depth = 3;
  options.width = 24;
  options.heads = 6;
  options.vocab = kVocab;
  options.seq = kTokens;
  options.kv_heads = 2;
  return options;
}

TrainInputs packed_inputs() {
  torch::manual_seed(12);
  return {make_model("llama-small", llama_sizes()),
          {.name = "packed", .train = std::make_shared<PackedRows>()}};
}

TrainOptions packed_options() {
  TrainOptions options;
  options.device = testing::device().str();
  options.global_batch = 12;
  options.epochs = 1;
  options.workers = 1;
  options.graph = GraphMode::kOff;
  options.evaluate = false;
  return options;
}

struct Trained {
  TrainSummary summary;
  std::vector<torch::Tensor> parameters;
};

Trained train_packed(TrainOptions options) {
  options.resolve();
  Trainer trainer(packed_inputs(), options, {.planning = {.quick = true}});
  Trained trained;
  trained.summary = trainer.run().summary;
  for (const auto& p : trainer.model().root->parameters()) {
    trained.parameters.push_back(p.detach().clone());
  }
  return trained;
}

TEST(LanguageTraining, SegmentsArePlannedWithinABudget) {
  TrainOptions plain = packed_options();
  plain.batch = 3;
  const Trained whole = train_packed(plain);
  plain.recompute = "all";
  const Trained least = train_packed(plain);
  TrainOptions planned = plain;
  planned.recompute.clear();
  // On CUDA, the margin of a budget exceeds the activations of this model.
  planned.memory_limit =
      testing::device().is_cuda()
          ? testing::enough_memory()
          : (whole.summary.peak_bytes + 2 * least.summary.peak_bytes) / 3;
  const Trained fitted = train_packed(planned);
  EXPECT_LE(fitted.summary.peak_bytes, planned.memory_limit);
  EXPECT_EQ(fitted.summary.replans, 0);
  ASSERT_TRUE(fitted.summary.predicted.has_value());
  EXPECT_NEAR(double(fitted.summary.predicted->peak_bytes) /
                  double(fitted.summary.peak_bytes),
              1, 0.03);
  for (size_t i = 0; i < whole.parameters.size(); ++i) {
    EXPECT_TRUE(same(whole.parameters[i], least.parameters[i])) << i;
    EXPECT_TRUE(same(whole.parameters[i], fitted.parameters[i])) << i;
  }
}

TrainConfig lora_config() {
  TrainConfig config = testing::small("llama-small");
  config.model_options = llama_sizes();
  config.lora.rank = 4;
  config.lora.alpha = 8;
  config.lora.targets = "q_proj,v_proj,down_proj";
  config.lora.dropout = 0.1;
  config.rate.base = 1e-2;
  return config;
}

NamedTensors starting_with(const NamedTensors& tensors, const char* prefix) {
  NamedTensors found;
  for (const auto& item : tensors) {
    if (item.first.starts_with(prefix)) found.push_back(item);
  }
  return found;
}

TEST(LanguageTraining, OnlyAdaptersAreTrainedAndHaveState) {
  const TrainConfig config = lora_config();
  const auto ended = testing::run(config);
  const Model before = make_train_model(config);
  const auto initial = before.root->named_parameters();
  int changed = 0;
  for (const auto& [name, tensor] :
       starting_with(ended.tensors, "parameter.")) {
    const std::string key = name.substr(std::string("parameter.").size());
    const bool equal = torch::equal(tensor, initial[key]);
    EXPECT_NE(equal, detail::is_adapter_parameter(key)) << name;
    changed += !equal;
  }
  EXPECT_EQ(changed, 3 * 3 * 2);
  const auto state = starting_with(ended.tensors, "optimizer.");
  EXPECT_FALSE(state.empty());
  for (const auto& [name, tensor] : state) {
    if (tensor.dim() > 0) {
      EXPECT_NE(name.find(".lora_"), std::string::npos) << name;
    }
  }
}

TEST(LanguageTraining, ResumedAdaptersEqualUninterruptedOnes) {
  TrainConfig config = lora_config();
  config.epochs = 1;
  expect_same(testing::run(config), testing::run(config, {3}), "resumed");
}

TEST(LanguageTraining, PlansKnowFrozenWeights) {
  TrainConfig config = lora_config();
  config.model_options.width = 96;
  config.lora.dropout = 0;
  config.batch = config.accumulate = config.epochs = 0;
  config.global_batch = 8;
  config.steps = 4;
  config.resolve();
  std::vector<std::pair<int64_t, PlanResult>> plans;
  {
    TrainingPlanner planner(config, {.quick = true});
    PlanRequest request;
    request.global_batch = config.global_batch;
    request.precisions = {config.precision};
    request.memory = 1;
    const PlanResult least = planner.plan(request);
    for (const double factor : {1.0, 1.4}) {
      request.memory =
          static_cast<int64_t>(factor * double(least.smallest_bytes));
      plans.emplace_back(request.memory, planner.plan(request));
    }
  }
  int64_t all = 0, trained = 0;
  for (const auto& p : make_train_model(config).root->parameters()) {
    all += static_cast<int64_t>(p.nbytes());
    if (p.requires_grad()) trained += static_cast<int64_t>(p.nbytes());
  }
  EXPECT_LT(trained, all / 4);
  // With gradients and state of all weights it would be at least four times these.
  if (testing::device().is_cpu()) {
    EXPECT_LT(plans[0].first, 3 * all);
  }
  for (const auto& [budget, result] : plans) {
    ASSERT_TRUE(result.feasible) << budget;
    const PlanMeasurement measured =
        measure_plan(config, result.plan, budget, 2);
    EXPECT_LE(measured.peak_bytes, budget);
    EXPECT_NEAR(double(result.plan.peak_bytes) / double(measured.peak_bytes), 1,
                0.03)
        << budget;
  }
}

TEST(LanguageTraining, ExportsAdaptersOrMergedWeights) {
  const TemporaryDirectory base;
  TrainConfig config = lora_config();
  config.resolve();
  const auto train_to = [&](const std::string& path) {
    Trainer trainer(make_inputs(config), config);
    TrainRun run;
    run.export_path = path;
    trainer.run(run);
    return trainer.model();
  };
  const std::string adapter = base.path() + "/adapter";
  const Model trained = train_to(adapter);
  const std::string merged = base.path() + "/merged.safetensors";
  train_to(merged);

  TrainConfig plain = config;
  plain.lora = {};
  Model continued = make_train_model(plain);
  load_lora(continued, adapter);
  Model whole = make_train_model(plain);
  load_weights(whole, merged);
  const auto expected = trained.root->named_parameters();
  for (const auto& item : continued.root->named_parameters()) {
    EXPECT_TRUE(torch::equal(item.value(), expected[item.key()].cpu()))
        << item.key();
  }
  merge_lora(continued);
  const auto found = whole.root->named_parameters();
  for (const auto& item : continued.root->named_parameters()) {
    EXPECT_TRUE(torch::allclose(item.value(), found[item.key()], 1e-6, 1e-7));
  }
  plain.adapter = adapter;
  EXPECT_TRUE(has_lora(make_train_model(plain)));

  const auto text = testing::error_of([&] {
    TrainConfig none = config;
    none.lora = {};
    Trainer trainer(make_inputs(none), none);
    TrainRun run;
    run.export_path = base.path();
    trainer.run(run);
  });
  EXPECT_NE(text.find("is a directory; only adapters"), std::string::npos)
      << text;
}

TEST(LanguageTraining, WrongAdapterOptionsAreRefused) {
  const auto error = [](const std::function<void(TrainConfig&)>& change) {
    TrainConfig config = lora_config();
    change(config);
    return testing::error_of([&] {
      config.resolve();
      make_train_model(config);
    });
  };
  const auto expect = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect(error([](auto& c) { c.lora.rank = 0; }),
         "[--lora-alpha] needs --lora");
  expect(error([](auto& c) { c.adapter = "there"; }),
         "expected either --lora or --adapter");
  expect(error([](auto& c) { c.lora.targets = "kproj"; }),
         "did you mean k_proj?");
  expect(error([](auto& c) { c.lora.dropout = 1; }), "[--lora-dropout]");
}

}  // namespace
}  // namespace reprise
