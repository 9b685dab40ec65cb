#include "compat/rng.h"
#include "support.h"

#include <reprise/memory/meter.h>
#include <reprise/models/model.h>
#include <reprise/recompute/checkpoint.h>
#include <reprise/recompute/execution.h>
#include <reprise/recompute/stage_costs.h>
#include <reprise/recompute/strategy.h>

namespace reprise {
namespace {

using testing::device;
using testing::on_device;
using testing::same;

TEST(StageCosts, MeasuresASimpleLayer) {
  constexpr int64_t kBytes = 64 * 64 * 4;
  const Chain chain = testing::equal_stages(2, 64);
  const auto chain_costs =
      measure_stage_costs(chain, {torch::randn({64, 64}, on_device())});
  EXPECT_EQ(chain_costs.input_bytes, std::vector<int64_t>{kBytes});
  EXPECT_EQ(chain_costs.output_gradient_bytes, kBytes);
  const StageCosts& stage = chain_costs.stages.at(1);
  ASSERT_EQ(stage.outputs.size(), 1u);
  EXPECT_EQ(stage.outputs[0].bytes, kBytes);
  EXPECT_EQ(stage.outputs[0].input, -1);
  EXPECT_EQ(stage.saved_inputs, std::vector<int>{0});   // by the product
  EXPECT_EQ(stage.saved_outputs, std::vector<int>{0});  // by tanh
  EXPECT_EQ(stage.saved_bytes, 0);
  EXPECT_EQ(stage.input_gradient_bytes, kBytes);
  EXPECT_GE(stage.keep_extra_bytes, kBytes);  // the product itself
  EXPECT_GT(stage.forward_ms, 0);
  EXPECT_GT(stage.backward_ms, 0);
  EXPECT_EQ(chain_costs.stages.at(0).input_gradient_bytes, 0);
}

TEST(StageCosts, RestoresAllState) {
  for (const SampleChain& sample : sample_chains()) {
    SampleChainOptions options;
    options.device = device();
    const Chain chain = sample.make_chain(options);
    const Tensors inputs = sample.make_inputs(options);
    std::vector<torch::Tensor> buffers;
    for (const auto& b : chain.buffers()) buffers.push_back(b.clone());
    chain.parameters()[0].mutable_grad() =
        torch::ones_like(chain.parameters()[0]);
    const auto rng = compat::RngState::capture(inputs);
    const int64_t before = live_bytes(device());
    measure_stage_costs(chain, inputs);
    EXPECT_EQ(live_bytes(device()), before) << sample.name;
    EXPECT_TRUE(rng == compat::RngState::capture(inputs)) << sample.name;
    for (size_t i = 0; i < buffers.size(); ++i) {
      EXPECT_TRUE(same(buffers[i], chain.buffers()[i])) << sample.name;
    }
    EXPECT_EQ(chain.parameters()[0].grad().min().item<float>(), 1);
    EXPECT_FALSE(chain.parameters()[1].grad().defined());
  }
}

TEST(StageCosts, PredictsKeptMemoryOfSampleChains) {
  for (const SampleChain& sample : sample_chains()) {
    SampleChainOptions options;
    options.device = device();
    options.batch = 32;
    const Chain chain = sample.make_chain(options);
    const Tensors inputs = sample.make_inputs(options);
    const auto chain_costs = measure_stage_costs(chain, inputs);
    Tensors state = chain.parameters();
    for (const auto& buffer : chain.buffers()) state.push_back(buffer);
    for (const char* strategy :
         {"none", "all", "sqrt", "checkpoints:2", "revolve:2"}) {
      const auto schedule = make_schedule(strategy, chain.size());
      const KeptMeter meter(state);
      Execution execution(chain, schedule, {.meter = &meter});
      const auto y = execution.forward(inputs);
      execution.backward({torch::ones_like(y[0]), {}});
      const auto simulated = simulate(schedule, chain_costs);
      EXPECT_NEAR(
          double(meter.peak_bytes()) / double(simulated.kept_peak_bytes), 1,
          0.02)
          << sample.name << " " << strategy;
    }
  }
}

TEST(StageCosts, MeasuresTwoStagesPerKind) {
  std::vector<Stage> plain, kinds;
  std::vector<int> runs(6, 0);
  for (int i = 0; i < 6; ++i) {
    // The last stage has a different shape.
    const int64_t to = i == 5 ? 32 : 64;
    torch::nn::Linear linear(64, to);
    linear->to(device());
    const auto stage =
        make_stage("stage", linear)
            .with_variant("counted",
                          [&runs, i, linear](const Tensors& in) mutable {
                            ++runs[static_cast<size_t>(i)];
                            return Tensors{linear(in.at(0)).relu()};
                          });
    plain.push_back(stage);
    kinds.push_back(stage.of_kind("layer"));
    EXPECT_EQ(kinds.back().on_first().kind(), "layer");
  }
  const Tensors inputs = {torch::randn({16, 64}, on_device())};
  const auto wanted = measure_stage_costs(Chain(plain), inputs);
  std::fill(runs.begin(), runs.end(), 0);
  const auto got = measure_stage_costs(Chain(kinds), inputs);
  // The input of the first stage requires no gradient, so it differs from the
  // second.
  for (const int i : {0, 1, 2, 5}) EXPECT_GT(runs[size_t(i)], 0) << i;
  for (const int i : {3, 4}) EXPECT_EQ(runs[size_t(i)], 0) << i;
  ASSERT_EQ(got.stages.size(), wanted.stages.size());
  EXPECT_EQ(got.output_gradient_bytes, wanted.output_gradient_bytes);
  for (size_t i = 0; i < got.stages.size(); ++i) {
    const StageCosts &a = got.stages[i], &b = wanted.stages[i];
    EXPECT_EQ(a.outputs.at(0).bytes, b.outputs.at(0).bytes) << i;
    EXPECT_EQ(a.saved_bytes, b.saved_bytes) << i;
    EXPECT_EQ(a.saved_inputs, b.saved_inputs) << i;
    EXPECT_EQ(a.keep_extra_bytes, b.keep_extra_bytes) << i;
    EXPECT_EQ(a.backward_extra_bytes, b.backward_extra_bytes) << i;
    EXPECT_EQ(a.input_gradient_bytes, b.input_gradient_bytes) << i;
    EXPECT_EQ(a.variants.size(), b.variants.size()) << i;
    EXPECT_GT(a.forward_ms, 0) << i;
  }
}

/// A stage that skips work if nothing reads its output.
TEST(StageCosts, MeasuresWhatUnusedOutputsSave) {
  const auto last = [](const torch::Tensor& x) {
    const int products = outputs_unused() ? 1 : 40;
    torch::Tensor y = x;
    for (int i = 0; i < products; ++i) y = y.mm(x.detach());
    return x + y.detach();
  };
  const Chain chain(
      {make_stage("skips", last),
       make_stage("tanh", [](const torch::Tensor& x) { return x.tanh(); })});
  StageCostOptions options;
  options.repeats = 3;
  const auto costs = measure_stage_costs(
      chain,
      {torch::randn({256, 256}, on_device()).mul_(0.05).requires_grad_()},
      options);
  const StageCosts& skips = costs.stages[0];
  EXPECT_GT(skips.unused_output_ms, 0.5 * skips.forward_ms);
  EXPECT_LT(skips.unused_output_ms, skips.forward_ms);
  EXPECT_EQ(costs.stages[1].unused_output_ms, 0);  // it did not ask
}

TEST(StageCosts, RejectsWrongUse) {
  const Chain chain = testing::equal_stages(1, 4);
  EXPECT_THROW(measure_stage_costs(chain, {}), c10::Error);
  EXPECT_THROW(
      measure_stage_costs(chain, {torch::ones({1, 4}, on_device())}, 0),
      c10::Error);
  const torch::NoGradGuard no_grad;
  EXPECT_THROW(measure_stage_costs(chain, {torch::ones({1, 4}, on_device())}),
               c10::Error);
}

TEST(StageCosts, OutputBytesAgreeWithAndWithoutCosts) {
  for (const SampleChain& sample : sample_chains()) {
    SampleChainOptions options;
    options.device = device();
    const Chain chain = sample.make_chain(options);
    const Tensors inputs = sample.make_inputs(options);
    const auto rng = compat::RngState::capture(inputs);
    const auto bytes = output_bytes(chain, inputs);
    EXPECT_TRUE(rng == compat::RngState::capture(inputs)) << sample.name;
    EXPECT_EQ(bytes, output_bytes(measure_stage_costs(chain, inputs)))
        << sample.name;
    EXPECT_GT(bytes.at(0), 0) << sample.name;
  }
}

}  // namespace
}  // namespace reprise
