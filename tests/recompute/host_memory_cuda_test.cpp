// Saved activations in host memory, on a device that copies asynchronously.
#include "compat/cuda.h"
#include "compat/cuda_graph.h"
#include "compat/timestamp.h"
#include "host_runs.h"

#include <reprise/memory/meter.h>
#include <reprise/plan/solver.h>
#include <reprise/recompute/keep.h>
#include <reprise/recompute/stage_costs.h>
#include <reprise/recompute/strategy.h>

#include <algorithm>

namespace reprise {
namespace {

using testing::device;
using testing::expect_equal;
using testing::keep_on_host;
using testing::on_device;
using testing::Outcome;
using testing::run_by;
using testing::same;
using torch::Tensor;
using Store = testing::CountingStore;

#define REPRISE_NEEDS_CUDA()                                  \
  if (!device().is_cuda()) {                                  \
    GTEST_SKIP() << "moving to the host needs a CUDA device"; \
  }

/// Matrix products that are expensive per saved byte.
Stage costly(int64_t width, int depth) {
  torch::nn::Sequential layers;
  for (int i = 0; i < depth; ++i) {
    torch::nn::Linear linear(
        torch::nn::LinearOptions(width, width).bias(false));
    layers->push_back(linear);
    layers->push_back(torch::nn::Tanh());
  }
  layers->to(device());
  return make_stage("costly", layers);
}

Chain costly_chain(int stages, int64_t width, int depth) {
  std::vector<Stage> list;
  for (int i = 0; i < stages; ++i) list.push_back(costly(width, depth));
  // Reduced, so that the caller holds no large gradient.
  list.push_back(
      make_stage("sum", [](const Tensor& x) { return (x * x).sum(); }));
  return Chain(list);
}

TEST(HostMemoryCuda, ResultsAreBitIdentical) {
  REPRISE_NEEDS_CUDA();
  torch::manual_seed(1);
  const auto store = std::make_shared<Store>();
  const Chain plain = costly_chain(4, 1024, 4);
  const Chain chain = with_host_variants(plain, store);
  const Tensors inputs = {torch::randn({4096, 1024}, on_device())};
  const Outcome wanted = run_by(plain, make_schedule("none", 5), inputs);
  const Schedule ahead = Schedule::parse(
      "ahead", 5, "K0.1 K1.1 K2.1 K3.1 K4 F3 B4 F2 B3 F1 B2 F0 B1 B0");
  for (int repeat = 0; repeat < 5; ++repeat) {
    expect_equal(run_by(chain, keep_on_host(chain, {0, 1, 2, 3}), inputs),
                 wanted);
    expect_equal(run_by(chain, ahead, inputs), wanted);
  }
  EXPECT_GT(store->counts->sent, 0);
  EXPECT_EQ(store->counts->alive, 0);
}

TEST(HostMemoryCuda, LowersThePeakByTheMovedBytes) {
  REPRISE_NEEDS_CUDA();
  const auto store = std::make_shared<Store>();
  const Chain chain = with_host_variants(costly_chain(6, 1024, 6), store);
  const Tensors inputs = {torch::randn({8192, 1024}, on_device())};
  const auto peak = [&](const Schedule& schedule) {
    Execution execution(chain, schedule);
    for (int i = 0; i < 2; ++i) {
      const Tensor y = execution.forward(inputs).at(0);
      execution.backward({torch::ones_like(y)});
    }
    MemoryMeter meter(device());
    const Tensor y = execution.forward(inputs).at(0);
    execution.backward({torch::ones_like(y)});
    return double(meter.peak_increase_bytes());
  };
  const double tensor = 8192 * 1024 * 4;
  const double plain = peak(keep_on_host(chain, {}));
  // Each stage saves five tanhs of its own; those of one stage are on the
  // device at the peak.
  const double moved = peak(keep_on_host(chain, {0, 1, 2, 3, 4, 5}));
  EXPECT_NEAR((plain - moved) / tensor, 5 * 5, 2);
  EXPECT_GE(store->held_bytes(), int64_t(6 * 5 * tensor));
  compat::cuda_synchronize(device().index());
  store->trim();
  EXPECT_EQ(store->held_bytes(), 0);
}

TEST(HostMemoryCuda, CopiesOverlapWithCompute) {
  REPRISE_NEEDS_CUDA();
  const auto store = std::make_shared<Store>();
  const int64_t width = 4096, rows = 4096;
  const Chain chain = with_host_variants(costly_chain(4, width, 6), store);
  const Tensors inputs = {torch::randn({rows, width}, on_device())};
  const auto time_of = [&](const Schedule& schedule) {
    Execution execution(chain, schedule);
    const auto step = [&] {
      const Tensor y = execution.forward(inputs).at(0);
      execution.backward({torch::ones_like(y)});
    };
    for (int i = 0; i < 2; ++i) step();
    std::vector<double> ms;
    for (int i = 0; i < 5; ++i) {
      const compat::CudaEvent start(device().index());
      step();
      const compat::CudaEvent end(device().index());
      ms.push_back(end.milliseconds_since(start));
    }
    std::sort(ms.begin(), ms.end());
    return ms[2];
  };
  const double plain = time_of(keep_on_host(chain, {}));
  const double moved = time_of(keep_on_host(chain, {0, 1, 2, 3}));
  const double ahead = time_of(Schedule::parse(
      "ahead", 5, "K0.1 K1.1 K2.1 K3.1 K4 F3 B4 F2 B3 F1 B2 F0 B1 B0"));
  // The same copies without overlap: 4 stages of 5 tanhs in both directions.
  const Tensor bytes =
      torch::empty({rows * width * 4}, on_device(torch::kByte));
  const auto copies = [&] {
    const compat::CudaEvent start(device().index());
    for (int i = 0; i < 4 * 5; ++i) {
      const auto copy = store->send(bytes);
      copy->leave();
      copy->bytes();
    }
    const compat::CudaEvent end(device().index());
    return end.milliseconds_since(start);
  };
  copies();
  const double alone = copies();
  RecordProperty("plain_ms", std::to_string(plain));
  RecordProperty("moved_ms", std::to_string(moved));
  RecordProperty("ahead_ms", std::to_string(ahead));
  RecordProperty("copies_ms", std::to_string(alone));
  std::printf("plain %.1f ms, moved %.1f, fetched ahead %.1f, copies %.1f\n",
              plain, moved, ahead, alone);
  // A good part of what can overlap does.
  EXPECT_LT(moved, plain + alone - 0.3 * std::min(plain, alone));
  EXPECT_LT(ahead, moved * 1.05);
}

TEST(HostMemoryCuda, WorksInACudaGraph) {
  REPRISE_NEEDS_CUDA();
  if (!compat::cuda_graph_unavailable_reason().empty()) {
    GTEST_SKIP() << compat::cuda_graph_unavailable_reason();
  }
  torch::manual_seed(1);
  const auto store = std::make_shared<Store>();
  const Chain chain = with_host_variants(costly_chain(4, 1024, 4), store);
  const Schedule schedule = Schedule::parse(
      "ahead", 5, "K0.1 K1.1 K2.1 K3.1 K4 F3 B4 F2 B3 F1 B2 F0 B1 B0");
  const Tensor x = torch::randn({4096, 1024}, on_device());
  const compat::GraphStreamScope stream(device(), true);
  Execution execution(chain, schedule);
  Tensor input = x.clone();
  const auto step = [&] {
    const Tensor y = execution.forward({input}).at(0);
    execution.backward({torch::ones_like(y)});
  };
  for (int i = 0; i < 2; ++i) step();  // gradients and buffers are there now
  const auto zero = [&] {
    for (auto& p : chain.parameters()) p.mutable_grad().zero_();
  };
  // Libraries may choose other algorithms in a capture.
  const auto expect_same = [](const Tensors& a, const Tensors& b) {
    for (size_t k = 0; k < a.size(); ++k) EXPECT_TRUE(same(a[k], b[k])) << k;
  };
  const auto gradients = [&] {
    Tensors list;
    for (const auto& p : chain.parameters()) list.push_back(p.grad().clone());
    return list;
  };
  std::vector<Tensors> wanted;
  for (int i = 0; i < 3; ++i) {
    zero();
    input.copy_(x * (i + 1));
    step();
    wanted.push_back(gradients());
  }
  const auto pool = std::make_shared<compat::CudaGraphPool>();
  compat::CudaGraph graph(device().index(), pool);
  graph.capture(step);
  EXPECT_EQ(store->counts->alive, 0);
  for (int i = 0; i < 3; ++i) {
    zero();
    input.copy_(x * (i + 1));
    graph.replay();
    expect_same(gradients(), wanted[size_t(i)]);
    // Between replays the same buffers are used without a CUDA graph.
    zero();
    step();
    expect_same(gradients(), wanted[size_t(i)]);
  }
}

TEST(HostMemoryCuda, SolverUsesItForExpensiveStages) {
  REPRISE_NEEDS_CUDA();
  torch::manual_seed(1);
  const auto store = std::make_shared<Store>();
  // 137 GFLOP per product of 4,096 × 4,096 for 64 MiB in single precision.
  const Chain chain = with_host_variants(costly_chain(8, 4096, 4), store);
  const Tensors inputs = {torch::randn({4096, 4096}, on_device())};
  const ChainCosts chain_costs = measure_stage_costs(chain, inputs, 5);
  ChainCosts without = chain_costs;
  for (StageCosts& stage : without.stages) stage.variants.clear();
  const Solver with(chain_costs);
  const Solver only_again(without);
  const int64_t budget = only_again.smallest_bytes() * 5 / 4;
  const auto chosen = with.solve(budget);
  const auto again = only_again.solve(budget);
  ASSERT_TRUE(chosen && again);
  std::printf("within %lld MiB: %.1f ms on the host, %.1f ms again; %s\n",
              static_cast<long long>(budget >> 20), chosen->simulation.time_ms,
              again->simulation.time_ms, chosen->schedule.to_text().c_str());
  EXPECT_GT(chosen->simulation.host_peak_bytes, 0);
  EXPECT_LT(chosen->simulation.time_ms, again->simulation.time_ms);
  // The measured peak stays within the budget.
  Execution execution(chain, chosen->schedule);
  for (int i = 0; i < 2; ++i) {
    MemoryMeter meter(device());
    const Tensor y = execution.forward(inputs).at(0);
    execution.backward({torch::ones_like(y)});
    if (i == 0) continue;  // makes the gradients of the parameters
    EXPECT_LE(meter.peak_increase_bytes(), budget * 103 / 100);
  }
}

TEST(HostMemoryCuda, OffloadsNamedValues) {
  REPRISE_NEEDS_CUDA();
  torch::manual_seed(1);
  const auto store = std::make_shared<Store>();
  torch::nn::Linear first(1024, 4096), second(4096, 1024);
  first->to(device());
  second->to(device());
  const Stage stage = with_named_saves(
      make_stage("mlp",
                 [first, second](const Tensor& x) mutable {
                   return second(torch::gelu(offload("up", first, x)));
                 },
                 {first.ptr(), second.ptr()}),
      store);
  const Chain chain(
      {stage, make_stage("sum", [](const Tensor& x) { return x.sum(); })});
  const Tensors inputs = {torch::randn({4096, 1024}, on_device())};
  const Outcome plain =
      run_by(chain, Schedule::parse("plain", 2, "K0 K1 B1 B0"), inputs);
  for (const char* text : {"K0.3 K1 B1 B0", "K0.3 K1 F0 B1 B0"}) {
    expect_equal(run_by(chain, Schedule::parse("given", 2, text), inputs),
                 plain);
    EXPECT_EQ(store->counts->alive, 0);
  }
  EXPECT_GT(store->counts->sent, 0);
}

}  // namespace
}  // namespace reprise
