#include "recompute/recompute_context.h"
#include "support.h"

#include <reprise/memory/meter.h>
#include <reprise/recompute/checkpoint.h>
#include <reprise/recompute/execution.h>
#include <reprise/recompute/strategy.h>

#include <torch/nn/modules/dropout.h>

#include <cmath>

namespace reprise {
namespace {

using testing::device;
using testing::equal_stages;
using testing::on_device;
using testing::Recorder;
using testing::same;
using testing::take_gradients;

TEST(Execution, RunsExactlyTheSchedule) {
  const Chain chain = equal_stages(6, 4);
  const auto schedule = make_schedule("revolve:2", 6);
  Recorder recorder;
  Execution execution(chain, schedule, {.observer = &recorder});
  const auto y = execution.forward({torch::ones({2, 4}, on_device())});
  EXPECT_EQ(recorder.ops.size(), schedule.forward_ops());
  EXPECT_TRUE(execution.pending());
  execution.backward({torch::ones_like(y[0])});
  EXPECT_EQ(recorder.ops, schedule.ops());
  EXPECT_FALSE(execution.pending());
  for (int i = 0; i < 6; ++i) EXPECT_EQ(recorder.runs(i), schedule.runs(i));
}

TEST(Execution, CanBeReused) {
  const Chain chain = equal_stages(3, 4);
  Execution execution(chain, make_schedule("all", 3));
  const auto x = torch::randn({2, 4}, on_device());
  const auto y = execution.forward({x});
  execution.backward({torch::ones_like(y[0])});
  const auto first = take_gradients(chain.parameters());
  execution.forward({x + 1});  // given up
  execution.forward({x});
  execution.backward({torch::ones_like(y[0])});
  const auto second = take_gradients(chain.parameters());
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_TRUE(same(first[i], second[i]));
  }
}

TEST(Execution, ReturnsGradientsOfInputsThatNeedThem) {
  const Chain chain(
      {make_stage("add", [](const torch::Tensor& a, const torch::Tensor& b) {
        return a * b;
      })});
  Execution execution(chain, make_schedule("checkpoints:0", 1));
  const auto a = torch::full({2}, 3.0, on_device()).requires_grad_();
  const auto b = torch::full({2}, 5.0, on_device());
  execution.forward({a, b});
  const auto gradients = execution.backward({torch::ones({2}, on_device())});
  ASSERT_EQ(gradients.size(), 2u);
  EXPECT_EQ(gradients[0][0].item<float>(), 5);
  EXPECT_FALSE(gradients[1].defined());
}

TEST(Execution, HoldsNothingThatAutogradDoesNotNeed) {
  // x + 1 saves nothing: a plain loop would keep no activations.
  std::vector<Stage> stages;
  torch::nn::Linear linear(256, 256);
  linear->to(device());
  stages.push_back(make_stage("linear", linear));
  for (int i = 0; i < 10; ++i) {
    stages.push_back(
        make_stage("add", [](const torch::Tensor& x) { return x + 1; }));
  }
  const Chain chain(std::move(stages));
  const auto x = torch::randn({256, 256}, on_device());
  Execution execution(chain, make_schedule("none", chain.size()));
  const MemoryMeter meter(device());
  auto y = execution.forward({x});
  const int64_t bytes = 256 * 256 * 4;
  EXPECT_EQ(meter.live_bytes() - meter.start_bytes(), bytes);  // the output
  y.clear();
  EXPECT_EQ(meter.live_bytes() - meter.start_bytes(), 0);
  execution.backward({torch::ones({256, 256}, on_device())});
}

TEST(Execution, NothingIsLeftAfterwards) {
  const Chain chain = equal_stages(8, 64);
  const auto x = torch::randn({64, 64}, on_device());
  for (const char* strategy :
       {"none", "all", "sqrt", "checkpoints:3", "revolve:2"}) {
    const KeptMeter kept(chain.parameters());
    const int64_t before = live_bytes(device());
    {
      Execution execution(chain, make_schedule(strategy, 8), {.meter = &kept});
      auto y = execution.forward({x});
      EXPECT_GT(kept.live_bytes(), 0);
      auto gradient = torch::ones_like(y[0]);
      y.clear();
      execution.backward({std::move(gradient)});
      EXPECT_EQ(kept.live_bytes(), 0) << strategy;
      take_gradients(chain.parameters());
      EXPECT_EQ(live_bytes(device()), before) << strategy;
      // A forward without a backward is released with the execution.
      execution.forward({x});
    }
    EXPECT_EQ(live_bytes(device()), before) << strategy;
  }
}

TEST(Execution, AVariantKeepsLessWithTheSameResult) {
  std::vector<Stage> stages;
  for (int i = 0; i < 3; ++i) {
    torch::nn::Sequential block(torch::nn::Linear(16, 64), torch::nn::Tanh(),
                                torch::nn::Dropout(0.3),
                                torch::nn::Linear(64, 16));
    block->to(device());
    const Stage plain = make_stage("block", block);
    stages.push_back(
        plain.with_variant("checkpoint", [plain](const Tensors& x) {
          return checkpoint_list(plain.function(), x);
        }));
  }
  const Chain chain(std::move(stages));
  const auto x = torch::randn({32, 16}, on_device());
  const auto step = [&](const std::string& text, int64_t* kept_bytes) {
    torch::manual_seed(3);
    const KeptMeter kept(chain.parameters());
    Execution execution(chain, Schedule::parse(text, 3, text),
                        {.meter = &kept});
    const auto y = execution.forward({x});
    execution.backward({torch::ones_like(y[0])});
    *kept_bytes = kept.peak_bytes();
    auto values = take_gradients(chain.parameters());
    values.push_back(y[0]);
    return values;
  };
  int64_t none = 0, one = 0, all = 0, again = 0;
  const auto expected = step("K0 K1 K2 B2 B1 B0", &none);
  for (const auto& [text, kept] : std::vector<std::pair<std::string, int64_t*>>{
           {"K0 K1.1 K2 B2 B1 B0", &one},
           {"K0.1 K1.1 K2.1 B2 B1 B0", &all},
           {"I0 D1 K2.1 B2 K0.1 K1 X2 B1 B0", &again}}) {
    const auto values = step(text, kept);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(same(values[i], expected[i])) << text << ", value " << i;
    }
  }
  EXPECT_LT(one, none);
  EXPECT_LT(all, one);
  EXPECT_LT(again, none);
}

TEST(Execution, DroppedRunsUseTheStageItself) {
  int own = 0, variant = 0;
  const auto count = [](int& runs) -> Stage::Function {
    return [&runs](const Tensors& x) {
      ++runs;
      return Tensors{torch::tanh(x[0])};
    };
  };
  const Chain chain(
      {Stage("counted", count(own)).with_variant("other", count(variant)),
       make_stage("tanh", [](const torch::Tensor& x) { return x.tanh(); })});
  Execution execution(chain, Schedule::parse("test", 2, "I0 K1 B1 K0.1 X1 B0"));
  const auto x = torch::ones({2}, on_device()).requires_grad_();
  execution.backward({torch::ones_like(execution.forward({x})[0])});
  EXPECT_EQ(own, 1);
  EXPECT_EQ(variant, 1);
}

/// Outputs of a run right before its backward are not read: wrong values change nothing.
TEST(Execution, TellsWhichOutputsAreNotUsed) {
  std::vector<std::pair<int, bool>>
      runs;  // stage, whether its outputs are unused
  std::vector<Stage> stages;
  for (int i = 0; i < 3; ++i) {
    torch::nn::Linear layer(8, 8);
    layer->to(device());
    stages.push_back(
        make_stage("linear",
                   [&runs, layer, i](const torch::Tensor& x) mutable {
                     runs.emplace_back(i, outputs_unused());
                     const auto y = layer(x.tanh());
                     if (outputs_unused()) y.detach().fill_(NAN);
                     return y;
                   },
                   {layer.ptr()}));
  }
  const Chain chain(std::move(stages));
  const auto x = torch::randn({4, 8}, on_device());
  const auto step = [&](const std::string& text) {
    runs.clear();
    Execution execution(chain, Schedule::parse(text, 3, text));
    const auto y = execution.forward({x});
    execution.backward({torch::ones_like(y[0])});
    auto values = take_gradients(chain.parameters());
    values.push_back(y[0]);
    return values;
  };
  const auto expected = step("K0 K1 K2 B2 B1 B0");
  EXPECT_EQ(runs, (decltype(runs){{0, false}, {1, false}, {2, false}}));
  using Runs = decltype(runs);
  for (const auto& [text, again] : std::vector<std::pair<std::string, Runs>>{
           {"I0 D1 K2 B2 K0 K1 X2 B1 B0", {{0, false}, {1, true}}},
           {"I0 I1 K2 B2 K1 X2 B1 K0 X1 B0", {{1, true}, {0, true}}},
           {"I0 D1 K2 B2 I0 K1 X2 B1 K0 X1 B0",
            {{0, false}, {1, true}, {0, true}}}}) {
    const auto values = step(text);
    EXPECT_EQ(Runs(runs.begin() + 3, runs.end()), again) << text;
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(same(values[i], expected[i])) << text << ", value " << i;
    }
  }
}

TEST(Execution, RejectsUnknownVariants) {
  const auto schedule = Schedule::parse("lean", 2, "K0.1 K1 B1 B0");
  const auto error =
      testing::error_of([&] { Execution(equal_stages(2, 4), schedule); });
  EXPECT_NE(error.find("variant up to 0 of stage 0 'stage0', got 1 in schedule "
                       "'lean'"),
            std::string::npos)
      << error;
}

TEST(Execution, OnFirstKeepsVariants) {
  const auto twice = [](const Tensors& x) { return Tensors{x[0] * 2}; };
  const Stage stage =
      Stage("double", twice).with_variant("same", twice).on_first();
  const auto x = torch::ones({2}, on_device());
  ASSERT_EQ(stage.variants().size(), 1u);
  EXPECT_EQ(stage.variants()[0].name, "same");
  const auto outputs = stage.function(1)({x, x});
  ASSERT_EQ(outputs.size(), 2u);
  EXPECT_TRUE(same(outputs[0], x * 2));
  EXPECT_THROW(stage.with_variant("none", nullptr), c10::Error);
}

TEST(Execution, KeepsNothingWithoutGradients) {
  const Chain chain(
      {make_stage("double", [](const torch::Tensor& x) { return x * 2; })});
  Execution execution(chain, make_schedule("all", 1));
  const auto x = torch::ones({4}, on_device());
  execution.forward({x});
  EXPECT_FALSE(execution.pending());
}

TEST(Execution, EvaluationRunsEachStageOnceWithoutRandomNumbers) {
  torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Dropout(0.5),
                            torch::nn::Linear(4, 4));
  net->to(device());
  const Chain chain(net);
  chain.eval();
  Recorder recorder;
  Execution execution(chain, make_schedule("all", 3), {.observer = &recorder});
  const auto x = torch::randn({2, 4}, on_device());
  const auto rng = compat::RngState::capture({x});
  const torch::NoGradGuard no_grad;
  EXPECT_TRUE(same(execution.forward({x})[0], net->forward(x)));
  EXPECT_TRUE(rng == compat::RngState::capture({x}));
  EXPECT_FALSE(execution.pending());
}

TEST(Execution, SupportsCheckpointsInsideStages) {
  torch::nn::Sequential block(torch::nn::Linear(4, 4),
                              torch::nn::BatchNorm1d(4), torch::nn::Tanh(),
                              torch::nn::Dropout(0.3));
  block->to(device());
  const auto stage = [&](bool nested) {
    return make_stage("block",
                      [block, nested](const torch::Tensor& x) mutable {
                        auto body = [block](const torch::Tensor& t) mutable {
                          return block->forward(t);
                        };
                        return nested ? checkpoint(body, x) : body(x);
                      },
                      {block.ptr()});
  };
  const auto x = torch::randn({6, 4}, on_device());
  const auto run = [&](bool nested, const char* strategy) {
    block->apply([](torch::nn::Module& m) {
      if (auto* norm = m.as<torch::nn::BatchNorm1d>())
        norm->reset_running_stats();
    });
    torch::manual_seed(4);
    const Chain chain({stage(nested), stage(nested), stage(nested)});
    Execution execution(chain, make_schedule(strategy, 3));
    const auto y = execution.forward({x});
    execution.backward({torch::ones_like(y[0])});
    auto results = take_gradients(block->parameters());
    results.push_back(y[0]);
    for (const auto& buffer : block->buffers()) {
      results.push_back(buffer.clone());
    }
    return results;
  };
  const auto expected = run(false, "none");
  for (const char* strategy : {"none", "all", "checkpoints:0", "revolve:1"}) {
    const auto got = run(true, strategy);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(same(got[i], expected[i])) << strategy << " " << i;
    }
  }
}

TEST(Execution, RestoresUserGenerators) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  const Chain chain({make_stage("noise", [&](const torch::Tensor& x) {
    return x * torch::rand({3}, generator).to(x.device());
  })});
  Execution execution(chain, make_schedule("checkpoints:0", 1),
                      {.generators = {generator}});
  const auto x = torch::ones({3}, on_device()).requires_grad_();
  const auto y = execution.forward({x});
  const auto gradient = execution.backward({torch::ones({3}, on_device())});
  EXPECT_TRUE(same(gradient[0], y[0]));
}

TEST(Execution, RecomputationUsesAutocastOfTheForward) {
  torch::nn::Linear linear(8, 8);
  linear->to(device());
  auto state = compat::AutocastState::current();
  (device().is_cuda() ? state.cuda_enabled : state.cpu_enabled) = true;
  (device().is_cuda() ? state.cuda_dtype : state.cpu_dtype) = torch::kBFloat16;
  std::vector<torch::ScalarType> types;
  const Chain chain({make_stage("linear",
                                [&](const torch::Tensor& x) {
                                  auto y = linear(x);
                                  types.push_back(y.scalar_type());
                                  return y;
                                },
                                {linear.ptr()})});
  Execution execution(chain, make_schedule("checkpoints:0", 1));
  Tensors y;
  {
    const compat::AutocastGuard guard(state);
    y = execution.forward({torch::ones({2, 8}, on_device())});
  }
  execution.backward({torch::ones_like(y[0])});
  EXPECT_EQ(types, (std::vector<torch::ScalarType>{torch::kBFloat16,
                                                   torch::kBFloat16}));
}

TEST(Execution, ReportsWhichGradientsAreFinal) {
  // Stages 0 and 3 share a parameter; every stage has one of its own.
  const auto shared = torch::full({4}, 0.5, on_device()).requires_grad_(true);
  struct Own : torch::nn::Module {
    explicit Own(torch::Tensor also) {
      weight = register_parameter("weight", torch::ones({4}, on_device()));
      if (also.defined()) register_parameter("shared", also);
    }
    torch::Tensor weight;
  };
  std::vector<Stage> stages;
  std::vector<std::shared_ptr<Own>> owns;
  for (int i = 0; i < 5; ++i) {
    const bool uses = i == 0 || i == 3;
    auto own = std::make_shared<Own>(uses ? shared : torch::Tensor());
    owns.push_back(own);
    stages.push_back(make_stage(std::to_string(i),
                                [own, uses, shared](const torch::Tensor& x) {
                                  const auto y = torch::tanh(x * own->weight);
                                  return uses ? y * shared : y;
                                },
                                {own}));
  }
  const Chain chain(stages);
  const auto x = torch::linspace(0.1, 1, 4, on_device());
  const auto all = [&] {
    Tensors list{shared};
    for (const auto& own : owns) list.push_back(own->weight);
    return list;
  };
  for (const char* strategy : {"none", "all", "every:2"}) {
    const Schedule schedule = make_schedule(strategy, 5);
    Execution plain(chain, schedule);
    // Two micro-batches, so that the second one adds to existing gradients.
    for (int micro = 0; micro < 2; ++micro) {
      plain.backward({torch::ones_like(plain.forward({x})[0])});
    }
    const auto expected = take_gradients(all());

    std::vector<int> told;
    bool last = false;
    const auto check = [&](int stage) {
      if (!last) return;
      told.push_back(stage);
      for (int i = stage; i < 5; ++i) {
        const auto& gradient = owns[static_cast<size_t>(i)]->weight.grad();
        EXPECT_TRUE(gradient.defined() &&
                    same(gradient, expected[static_cast<size_t>(i) + 1]))
            << strategy << ": stage " << i << " at " << stage;
      }
      if (stage == 0) {
        EXPECT_TRUE(same(shared.grad(), expected[0]));
      }
    };
    Execution telling(chain, schedule, {.cuts = {2, 4}, .final_from = check});
    for (int micro = 0; micro < 2; ++micro) {
      last = micro == 1;
      telling.backward({torch::ones_like(telling.forward({x})[0])});
    }
    take_gradients(all());
    EXPECT_EQ(told.back(), 0);
    EXPECT_EQ(std::count(told.begin(), told.end(), 4), 1) << strategy;
    EXPECT_EQ(std::count(told.begin(), told.end(), 2), 1) << strategy;
    EXPECT_TRUE(std::is_sorted(told.rbegin(), told.rend()));
  }
}

}  // namespace
}  // namespace reprise
