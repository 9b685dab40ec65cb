// Stages that save activations in host memory. On the CPU, a fake store copies
// to other memory of the host and counts; on CUDA the real one is used. See
// also host_memory_cuda_test.cpp.
#include "compat/cuda.h"
#include "host_runs.h"
#include "plan/fetch_ahead.h"

#include <reprise/memory/meter.h>
#include <reprise/plan/solver.h>
#include <reprise/recompute/checkpoint.h>
#include <reprise/recompute/host_memory.h>
#include <reprise/recompute/stage_costs.h>
#include <reprise/recompute/strategy.h>

#include <algorithm>

namespace reprise {
namespace {

using testing::device;
using testing::equal;
using testing::error_of;
using testing::expect_equal;
using testing::keep_on_host;
using testing::on_device;
using testing::Outcome;
using testing::run_by;
using testing::take_gradients;
using Store = testing::CountingStore;
using torch::Tensor;

constexpr int64_t kRows = 64, kWidth = 64;
constexpr int64_t kSize = kRows * kWidth * 4;

HostOptions small_too() {
  HostOptions options;
  options.min_bytes = kSize;
  options.max_in_flight = 2;
  return options;
}

/// Two linear layers with a tanh after each. Autograd saves the input, the
/// inner tanh (twice: as a result and as the next layer's input) and the
/// output.
Stage two_layers(const std::string& name) {
  torch::nn::Sequential layers(
      torch::nn::Linear(kWidth, kWidth), torch::nn::Tanh(),
      torch::nn::Linear(kWidth, kWidth), torch::nn::Tanh());
  layers->to(device());
  return make_stage(name, layers);
}

Chain layers(int stages) {
  std::vector<Stage> list;
  for (int i = 0; i < stages; ++i) {
    list.push_back(two_layers("stage" + std::to_string(i)));
  }
  return Chain(list);
}

TEST(HostMemory, MovesUnsharedStoragesOnce) {
  torch::manual_seed(1);
  const auto store = std::make_shared<Store>();
  const Chain plain = layers(1);
  const Chain chain = with_host_variants(plain, store, small_too());
  EXPECT_EQ(host_variant(plain[0]), 0);
  ASSERT_EQ(host_variant(chain[0]), 1);
  EXPECT_EQ(chain[0].variants()[0].name, kOnHost);
  const Tensors inputs = {
      torch::randn({kRows, kWidth}, on_device()).requires_grad_()};
  const Outcome wanted = run_by(plain, make_schedule("none", 1), inputs);
  const Schedule schedule = keep_on_host(chain, {0});
  for (int repeat = 0; repeat < 3; ++repeat) {
    store->counts->sent = store->counts->fetched = store->counts->opened = 0;
    expect_equal(run_by(chain, schedule, inputs), wanted);
    // The inner tanh's result and, until it is known to be held elsewhere, the
    // stage's output.
    EXPECT_EQ(store->counts->sent, repeat == 0 ? 2 : 1) << repeat;
    EXPECT_EQ(store->counts->fetched, 1);
    EXPECT_EQ(store->counts->opened, 2);  // by the tanh and by the layer after
    EXPECT_EQ(store->counts->alive, 0);
  }
}

TEST(HostMemory, GraphsHoldLessOnTheDevice) {
  torch::manual_seed(1);
  const auto store = std::make_shared<Store>();
  const Chain chain = with_host_variants(layers(4), store, small_too());
  const Tensors inputs = {torch::randn({kRows, kWidth}, on_device())};
  const ChainCosts chain_costs = measure_stage_costs(chain, inputs);
  for (const StageCosts& stage : chain_costs.stages) {
    ASSERT_EQ(stage.variants.size(), 1u);
    EXPECT_EQ(stage.saved_bytes, kSize);
    EXPECT_EQ(stage.host_bytes, 0);
    const KeptRunCosts& host = stage.variants[0];
    EXPECT_EQ(host.saved_bytes, 0);
    EXPECT_EQ(host.host_bytes, kSize);
    EXPECT_EQ(host.saved_inputs, stage.saved_inputs);
    EXPECT_EQ(host.saved_outputs, stage.saved_outputs);
    // Fetched tensors increase the memory of the backward.
    EXPECT_GE(host.backward_extra_bytes, kSize);
  }
  for (const std::vector<int>& stages :
       {std::vector<int>{}, {1}, {0, 1, 2, 3}}) {
    const Schedule schedule = keep_on_host(chain, stages);
    const auto simulated = simulate(schedule, chain_costs);
    EXPECT_EQ(simulated.host_peak_bytes,
              static_cast<int64_t>(stages.size()) * kSize);
    const KeptMeter kept(chain.parameters());
    Execution execution(chain, schedule, {.meter = &kept});
    const auto y = execution.forward(inputs);
    EXPECT_EQ(kept.live_bytes(), simulated.kept_after_forward_bytes);
    EXPECT_EQ(store->counts->bytes, simulated.host_peak_bytes);
    execution.backward({torch::ones_like(y[0])});
    EXPECT_EQ(kept.live_bytes(), 0);
    EXPECT_EQ(store->counts->alive, 0);
  }
}

TEST(HostMemory, PeakEqualsTheSimulation) {
  torch::manual_seed(1);
  const auto store = std::make_shared<Store>();
  std::vector<Stage> stages;
  for (int i = 0; i < 6; ++i) stages.push_back(two_layers("layers"));
  stages.push_back(
      make_stage("sum", [](const Tensor& x) { return (x * x).sum(); }));
  const Chain chain = with_host_variants(Chain(stages), store, small_too());
  const Tensors inputs = {torch::randn({kRows, kWidth}, on_device())};
  const ChainCosts chain_costs = measure_stage_costs(chain, inputs);
  const auto measure = [&](const Schedule& schedule) {
    Execution execution(chain, schedule, {.separate_graphs = true});
    const auto step = [&] {
      const Tensor y = execution.forward(inputs).at(0);
      execution.backward({torch::ones_like(y)});
    };
    step();  // makes the gradients of the parameters
    MemoryMeter meter(device());
    step();
    return meter.peak_increase_bytes();
  };
  for (const std::vector<int>& on_host :
       {std::vector<int>{}, {0, 1, 2, 3, 4, 5}, {0, 2, 4}}) {
    const Schedule schedule = keep_on_host(chain, on_host);
    EXPECT_NEAR(double(measure(schedule)),
                double(simulate(schedule, chain_costs).peak_bytes),
                0.1 * kSize);
  }
}

TEST(HostMemory, ViewsKeepTheirLayout) {
  const auto store = std::make_shared<Store>();
  const auto function = [](const Tensor& x) {
    const Tensor y = x * 2;
    // Views of one storage, one of them transposed, one with every other
    // column.
    const auto parts = y.chunk(2, 1);
    const Tensor a = parts[0].t(), b = parts[1].slice(1, 0, kWidth / 2, 2);
    return torch::mm(a, b.exp()) * torch::sigmoid(y.narrow(0, 3, 1)).sum() +
           (b * b).sum();
  };
  const Chain plain = Chain::of(function);
  const Chain chain = with_host_variants(plain, store, small_too());
  const Tensors inputs = {
      torch::randn({kRows, kWidth}, on_device()).requires_grad_()};
  expect_equal(run_by(chain, keep_on_host(chain, {0}), inputs),
               run_by(plain, make_schedule("none", 1), inputs));
  EXPECT_GE(store->counts->sent, 1);
  EXPECT_EQ(store->counts->alive, 0);
}

TEST(HostMemory, DetectsInPlaceModifications) {
  const auto store = std::make_shared<Store>();
  const Tensors inputs = {
      torch::randn({kRows, kWidth}, on_device()).requires_grad_()};
  // exp saves its result, which is overwritten.
  const Chain wrong = with_host_variants(
      Chain::of([](const Tensor& x) { return x.exp().add_(1).sum(); }), store,
      small_too());
  EXPECT_NE(error_of([&] {
              run_by(wrong, keep_on_host(wrong, {0}), inputs);
            }).find("modified in place"),
            std::string::npos);
  // relu_ saves its in-place result.
  const Chain right = Chain::of([](const Tensor& x) {
    Tensor y = x * 3;
    y.relu_();
    return (y * y).sum();
  });
  const Chain moved = with_host_variants(right, store, small_too());
  expect_equal(run_by(moved, keep_on_host(moved, {0}), inputs),
               run_by(right, make_schedule("none", 1), inputs));
  EXPECT_EQ(store->counts->alive, 0);
}

TEST(HostMemory, SmallTensorsStayOnTheDevice) {
  torch::manual_seed(1);
  const Chain plain = layers(3);
  const Tensors inputs = {torch::randn({kRows, kWidth}, on_device())};
  const Outcome wanted = run_by(plain, make_schedule("none", 3), inputs);
  const auto check = [&](const std::shared_ptr<Store>& store,
                         const HostOptions& options, int64_t on_host) {
    const Chain chain = with_host_variants(plain, store, options);
    const Schedule schedule = keep_on_host(chain, {0, 1, 2});
    const KeptMeter kept(chain.parameters());
    run_by(chain, schedule, inputs);  // learns what others hold
    Execution execution(chain, schedule, {.meter = &kept});
    execution.forward(inputs);
    EXPECT_EQ(store->counts->bytes, on_host);
    // Input, two boundaries and the output; one tensor per stage stays on the
    // device.
    EXPECT_EQ(kept.live_bytes(), 7 * kSize - on_host);
    expect_equal(run_by(chain, schedule, inputs), wanted);
  };
  check(std::make_shared<Store>(), {}, 0);
  HostOptions larger = small_too();
  larger.min_bytes = kSize + 1;
  check(std::make_shared<Store>(), larger, 0);
  check(std::make_shared<Store>(2 * kSize), small_too(), 2 * kSize);
  check(std::make_shared<Store>(), small_too(), 3 * kSize);
}

TEST(HostMemory, AFailedFetchLeavesNothingBehind) {
  torch::manual_seed(1);
  const auto store = std::make_shared<Store>();
  const Chain plain = layers(3);
  const Chain chain = with_host_variants(plain, store, small_too());
  const Tensors inputs = {torch::randn({kRows, kWidth}, on_device())};
  const Schedule schedule = keep_on_host(chain, {0, 1, 2});
  const Outcome wanted = run_by(plain, make_schedule("none", 3), inputs);
  run_by(chain, schedule, inputs);
  const int64_t before = live_bytes(device());
  for (int fails = 0; fails < 3; ++fails) {
    store->counts->fetched = 0;
    store->counts->fails_at = fails;
    EXPECT_NE(error_of([&] {
                run_by(chain, schedule, inputs);
              }).find("injected fetch failure"),
              std::string::npos);
    EXPECT_EQ(store->counts->alive, 0) << fails;
    take_gradients(chain.parameters());
    EXPECT_EQ(live_bytes(device()), before) << fails;
  }
  store->counts->fails_at = -1;
  expect_equal(run_by(chain, schedule, inputs), wanted);
}

TEST(HostMemory, AStageThatThrowsLeavesNothingBehind) {
  const auto store = std::make_shared<Store>();
  bool fails = true;
  const Chain chain = with_host_variants(Chain::of([&fails](const Tensor& x) {
                                           const Tensor y = x.exp().tanh();
                                           TORCH_CHECK(!fails, "not today");
                                           return y.sum();
                                         }),
                                         store, small_too());
  const Tensors inputs = {
      torch::randn({kRows, kWidth}, on_device()).requires_grad_()};
  const Schedule schedule = keep_on_host(chain, {0});
  const int64_t before = live_bytes(device());
  EXPECT_THROW(run_by(chain, schedule, inputs), c10::Error);
  EXPECT_EQ(store->counts->sent, 2);
  EXPECT_EQ(store->counts->alive, 0);
  EXPECT_EQ(live_bytes(device()), before);
  fails = false;
  EXPECT_NO_THROW(run_by(chain, schedule, inputs));
}

TEST(HostMemory, ADestroyedGraphFreesItsMemory) {
  const auto store = std::make_shared<Store>();
  const Chain chain = with_host_variants(layers(2), store, small_too());
  const Tensors inputs = {torch::randn({kRows, kWidth}, on_device())};
  const int64_t before = live_bytes(device());
  {
    Execution execution(chain, keep_on_host(chain, {0, 1}));
    execution.forward(inputs);
    EXPECT_GT(store->counts->alive, 0);
    execution.forward(inputs);  // starts over
  }
  EXPECT_EQ(store->counts->alive, 0);
  EXPECT_EQ(live_bytes(device()), before);
}

TEST(HostMemory, FetchOperationsPrefetch) {
  torch::manual_seed(1);
  const auto store = std::make_shared<Store>();
  const Chain plain = layers(3);
  const Chain chain = with_host_variants(plain, store, small_too());
  const Tensors inputs = {torch::randn({kRows, kWidth}, on_device())};
  const Schedule schedule =
      Schedule::parse("ahead", 3, "K0.1 K1.1 K2.1 F1 B2 F0 B1 B0");
  struct Fetches : ExecutionObserver {
    explicit Fetches(Store& s) : store(s) {}
    void after(const Op& op) override {
      if (op.kind == OpKind::kFetch || op.kind == OpKind::kBackward) {
        seen.push_back(store.counts->fetched);
      }
    }
    Store& store;
    std::vector<int> seen;
  } fetches(*store);
  Execution execution(chain, schedule, {.observer = &fetches});
  const Tensor y = execution.forward(inputs).at(0);
  execution.backward({torch::ones_like(y)});
  // F1, then B2 with its own fetch, F0, B1 and B0 with nothing left to fetch.
  EXPECT_EQ(fetches.seen, (std::vector<int>{1, 2, 3, 3, 3}));
  take_gradients(chain.parameters());
  expect_equal(run_by(chain, schedule, inputs),
               run_by(plain, make_schedule("none", 3), inputs));
  EXPECT_EQ(store->counts->alive, 0);

  const ChainCosts chain_costs = measure_stage_costs(chain, inputs);
  const auto peak = [&](const char* text) {
    return simulate(Schedule::parse("s", 3, text), chain_costs).peak_bytes;
  };
  EXPECT_EQ(peak("K0.1 K1.1 K2.1 F1 B2 F0 B1 B0"),
            peak("K0.1 K1.1 K2.1 B2 B1 B0") + kSize);
}

TEST(HostMemory, CombinesWithCheckpoints) {
  torch::manual_seed(1);
  const auto store = std::make_shared<Store>();
  const Stage inner = two_layers("inner");
  const Chain plain({make_stage(
      "stage",
      [inner](const Tensor& x) {
        const auto f = [inner](const Tensors& in) { return inner(in); };
        const Tensor y = checkpoint_list(f, {x.exp().tanh()}).at(0);
        return (y * y.sigmoid()).sum();
      },
      inner.modules())});
  const Chain chain = with_host_variants(plain, store, small_too());
  const Tensors inputs = {
      torch::randn({kRows, kWidth}, on_device()).requires_grad_()};
  const Outcome wanted = run_by(plain, make_schedule("none", 1), inputs);
  expect_equal(run_by(chain, keep_on_host(chain, {0}), inputs), wanted);
  EXPECT_EQ(store->counts->alive, 0);
}

TEST(HostMemory, DroppedAndRecomputedRunsMoveNothing) {
  torch::manual_seed(1);
  const auto store = std::make_shared<Store>();
  const Chain plain = layers(4);
  const Chain chain = with_host_variants(plain, store, small_too());
  const Tensors inputs = {torch::randn({kRows, kWidth}, on_device())};
  const Outcome wanted = run_by(plain, make_schedule("none", 4), inputs);
  for (const char* strategy : {"all", "sqrt"}) {
    expect_equal(run_by(chain, make_schedule(strategy, 4), inputs), wanted);
  }
  EXPECT_EQ(store->counts->sent, 0);
  // One of the recomputed stages is kept on the host.
  const Schedule mixed =
      Schedule::parse("mixed", 4, "I0 D1 K2.1 K3.1 B3 B2 K0.1 K1 X2 B1 B0");
  expect_equal(run_by(chain, mixed, inputs), wanted);
  EXPECT_GT(store->counts->sent, 0);
  EXPECT_EQ(store->counts->alive, 0);
  const torch::NoGradGuard no_grad;
  chain.forward(inputs, mixed);
}

TEST(HostMemory, SolverUsesItIfItIsFaster) {
  // A chain of equal stages that save 100 bytes each and have a small boundary.
  const auto costs_of = [](double host_ms) {
    std::vector<StageCosts> stages;
    for (int i = 0; i < 8; ++i) {
      StageCosts stage = StageCosts::simple(1, 100, 10, 20);
      KeptRunCosts host = stage;
      host.saved_bytes = 0;
      host.host_bytes = 100;
      host.keep_extra_bytes = 100;
      host.backward_extra_bytes += 100;
      host.backward_ms += host_ms;
      stage.variants.push_back(host);
      stages.push_back(stage);
    }
    return ChainCosts::simple(1, stages);
  };
  const auto solve = [](const ChainCosts& chain_costs, int64_t bytes) {
    const auto solution = Solver(chain_costs).solve(bytes);
    EXPECT_TRUE(solution);
    return *solution;
  };
  const auto cheap = solve(costs_of(2), 320);
  EXPECT_GT(cheap.simulation.host_peak_bytes, 0);
  EXPECT_EQ(cheap.simulation.total_runs, 8);  // nothing runs again
  EXPECT_LE(cheap.simulation.peak_bytes, 320);
  const auto dear = solve(costs_of(50), 320);
  EXPECT_EQ(dear.simulation.host_peak_bytes, 0) << dear.schedule.to_text();
  EXPECT_GT(dear.simulation.total_runs, 8);

  // Prefetched if there is room for it.
  const ChainCosts chain_costs = costs_of(2);
  const Schedule all =
      Schedule::parse("all", 4, "K0.1 K1.1 K2.1 K3.1 B3 B2 B1 B0");
  ChainCosts four = chain_costs;
  four.stages.resize(4);
  const int64_t peak = simulate(all, four).peak_bytes;
  EXPECT_EQ(detail::fetch_ahead(all, four, peak + 100).to_text(),
            "K0.1 K1.1 K2.1 K3.1 F2 B3 F1 B2 F0 B1 B0");
  const Schedule tight = detail::fetch_ahead(all, four, peak);
  EXPECT_EQ(simulate(tight, four).peak_bytes, peak);
  EXPECT_LT(tight.ops().size(), all.ops().size() + 3);
  EXPECT_EQ(simulate(tight, four).time_ms, simulate(all, four).time_ms);
}

TEST(HostMemory, RejectsANullStore) {
  EXPECT_NE(error_of([] {
              with_host_variant(two_layers("stage"), nullptr);
            }).find("expected a store"),
            std::string::npos);
  if (compat::cuda_built()) return;
  EXPECT_THROW(make_host_store(0, 1), c10::Error);
}

}  // namespace
}  // namespace reprise
