// The truth is the same chain with all parameters on the device.
#include "recompute/host_parameters.h"

#include "support.h"

#include <reprise/memory/meter.h>
#include <reprise/recompute/strategy.h>

#include <torch/nn.h>

namespace reprise {
namespace {

using detail::HostParameters;
using detail::HostTensorsOnCpu;
using detail::StageVisit;
using torch::Tensor;

constexpr int64_t kLayerWidth = 64;  // a weight has 16 KiB

/// Stages with a weight each; the first and the last share one more.
struct Layers {
  Layers() : chain(make_chain()) {}

  Chain make_chain() {
    torch::manual_seed(3);
    tied = torch::nn::Linear(kLayerWidth, kLayerWidth);
    std::vector<Stage> stages;
    for (int i = 0; i < 4; ++i) {
      linear.push_back(torch::nn::Linear(kLayerWidth, kLayerWidth));
      // The others have two weights of their own.
      const bool shares = i == 0 || i == 3;
      auto second = shares ? tied : torch::nn::Linear(kLayerWidth, kLayerWidth);
      stages.push_back(
          make_stage("layer" + std::to_string(i),
                     [layer = linear.back(), second](const Tensor& x) mutable {
                       return second->forward(torch::tanh(layer->forward(x)));
                     },
                     {linear.back().ptr(), second.ptr()}));
    }
    return Chain(std::move(stages));
  }
  std::vector<torch::nn::Linear> linear;
  torch::nn::Linear tied{nullptr};
  Chain chain;
};

Tensor input_of(int micro) {
  torch::manual_seed(100 + micro);
  return torch::randn({8, kLayerWidth});
}

TEST(HostParameters, ListsVisitsOfASchedule) {
  const auto all = detail::stage_visits(make_schedule("all", 3));
  EXPECT_EQ(all, (std::vector<StageVisit>{
                     {0, false}, {1, false}, {2, true}, {1, true}, {0, true}}));
  const auto none = detail::stage_visits(make_schedule("none", 3));
  EXPECT_EQ(none, all);
}

TEST(HostParameters, DoesNotChangeGradients) {
  for (const char* strategy : {"none", "all", "sqrt"}) {
    const Schedule schedule = make_schedule(strategy, 4);
    const Layers plain;
    Execution reference(plain.chain, schedule);
    Layers moved;
    const HostTensorsOnCpu on_cpu(1 << 30, 1 << 20);
    const auto host = std::make_shared<HostParameters>(
        moved.chain, torch::kCPU, HostTensorsOnCpu::make());
    ASSERT_TRUE(host->move_to_host());
    ASSERT_EQ(moved.linear[1]->weight.storage().data(), nullptr);
    ASSERT_NE(moved.tied->weight.storage().data(), nullptr);
    Execution execution(HostParameters::wrapped(moved.chain, host), schedule,
                        {.memory = host.get(), .cuts = host->cuts()});
    for (int micro = 0; micro < 3; ++micro) {
      const Tensors expected = reference.forward({input_of(micro)});
      reference.backward({torch::ones_like(expected[0])});
      host->begin(detail::stage_visits(schedule));
      const Tensors got = execution.forward({input_of(micro)});
      execution.backward({torch::ones_like(got[0])});
      host->end();
      EXPECT_TRUE(testing::same(got[0], expected[0])) << strategy;
      EXPECT_FALSE(moved.linear[1]->weight.grad().defined());
    }
    const HostParameters::Readable readable(host.get());
    const auto parameters = moved.chain.parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_TRUE(testing::same(parameters[i], plain.chain.parameters()[i]));
      EXPECT_TRUE(testing::same(parameters[i].grad(),
                                plain.chain.parameters()[i].grad()))
          << strategy << " " << i;
    }
  }
}

TEST(HostParameters, HasFewStagesOnTheDevice) {
  const HostTensorsOnCpu on_cpu(1 << 30, 1 << 20);
  const Layers layers;
  const auto host = std::make_shared<HostParameters>(layers.chain, torch::kCPU,
                                                     HostTensorsOnCpu::make());
  const int64_t before = live_bytes(torch::kCPU);
  ASSERT_TRUE(host->move_to_host());
  int64_t sum = 0;
  for (const int64_t bytes : host->stage_bytes()) sum += bytes;
  EXPECT_GE(sum, 4 * kLayerWidth * kLayerWidth * 4);
  EXPECT_LE(live_bytes(torch::kCPU), before - sum);
  const Chain chain = HostParameters::wrapped(layers.chain, host);
  const Schedule schedule = make_schedule("all", 4);
  Execution execution(chain, schedule,
                      {.memory = host.get(), .cuts = host->cuts()});
  host->begin(detail::stage_visits(schedule));
  const int64_t between = live_bytes(torch::kCPU);
  execution.forward({input_of(0)});
  // Two stages, and two boundaries besides the input.
  const int64_t stage = host->stage_bytes()[1];
  EXPECT_LE(live_bytes(torch::kCPU) - between,
            2 * stage + 8 * 8 * kLayerWidth * 4);
  host->abandon();
  EXPECT_LE(live_bytes(torch::kCPU) - between, 8 * 8 * kLayerWidth * 4);
}

TEST(HostParameters, MovesBack) {
  const HostTensorsOnCpu on_cpu(1 << 30, 1 << 20);
  const Layers plain, moved;
  const auto host = std::make_shared<HostParameters>(moved.chain, torch::kCPU,
                                                     HostTensorsOnCpu::make());
  ASSERT_TRUE(host->move_to_host());
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(host->move_to_host());
    EXPECT_GT(host->host_bytes(), 0);
    host->move_to_device();
    EXPECT_EQ(host->host_bytes(), 0);
  }
  for (size_t i = 0; i < plain.chain.parameters().size(); ++i) {
    EXPECT_TRUE(testing::same(moved.chain.parameters()[i],
                              plain.chain.parameters()[i]));
  }
}

TEST(HostParameters, KeepsUpdatedValuesAndGivenGradients) {
  const HostTensorsOnCpu on_cpu(1 << 30, 1 << 20);
  Layers layers;
  const auto host = std::make_shared<HostParameters>(layers.chain, torch::kCPU,
                                                     HostTensorsOnCpu::make());
  ASSERT_TRUE(host->move_to_host());
  Tensor weight = layers.linear[2]->weight;
  Tensor old;
  {
    const HostParameters::Readable readable(host.get());
    old = weight.detach().clone();
    weight.mutable_grad() = torch::full_like(weight, 2);
  }
  EXPECT_FALSE(weight.grad().defined());
  host->begin({{2, true}});
  host->before({OpKind::kBackward, 2});
  ASSERT_TRUE(weight.grad().defined());
  {
    const torch::NoGradGuard no_grad;
    weight.add_(weight.grad());
    weight.mutable_grad().reset();
  }
  host->end();
  const HostParameters::Readable readable(host.get());
  EXPECT_TRUE(testing::same(weight.detach(), old + 2));
  EXPECT_FALSE(weight.grad().defined());
}

TEST(HostParameters, ReleasesMemoryWithoutGradients) {
  const HostTensorsOnCpu on_cpu(1 << 30, 1 << 20);
  const Layers layers;
  const auto host = std::make_shared<HostParameters>(layers.chain, torch::kCPU,
                                                     HostTensorsOnCpu::make());
  ASSERT_TRUE(host->move_to_host());
  const int64_t without = host->host_bytes();
  ASSERT_TRUE(host->reserve_gradients());
  const int64_t with = host->host_bytes();
  EXPECT_GT(with, without);
  Tensor weight = layers.linear[1]->weight;
  {
    const HostParameters::Readable readable(host.get());
    weight.mutable_grad() = torch::full_like(weight, 2);
  }
  host->release_gradients();
  EXPECT_EQ(host->host_bytes(), with);
  host->forget_gradients();
  host->release_gradients();
  EXPECT_EQ(host->host_bytes(), without);
}

TEST(HostParameters, StaysWithoutRoom) {
  const HostTensorsOnCpu on_cpu(1 << 10, 1 << 20);
  const Layers plain, layers;
  const auto host = std::make_shared<HostParameters>(layers.chain, torch::kCPU,
                                                     HostTensorsOnCpu::make());
  EXPECT_FALSE(host->move_to_host());
  EXPECT_FALSE(host->on_host());
  EXPECT_TRUE(
      testing::same(layers.chain.parameters()[0], plain.chain.parameters()[0]));
}

}  // namespace
}  // namespace reprise
