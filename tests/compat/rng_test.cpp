#include "compat/rng.h"

#include "support.h"

#include <reprise/memory/meter.h>

namespace reprise::compat {
namespace {

using reprise::testing::on_device;

TEST(Rng, RestoreRepeatsTheNumbers) {
  const auto probe = torch::zeros({1}, on_device());
  const auto state = RngState::capture({probe});
  const auto first = torch::randn({100}, on_device());
  EXPECT_FALSE(torch::equal(first, torch::randn({100}, on_device())));
  state.restore();
  EXPECT_TRUE(torch::equal(first, torch::randn({100}, on_device())));
}

TEST(Rng, GuardLeavesThePositionAlone) {
  const auto probe = torch::zeros({1}, on_device());
  const auto state = RngState::capture({probe});
  torch::randn({7}, on_device());
  const auto here = RngState::capture({probe});
  {
    const RngGuard guard(state);
    torch::randn({1000}, on_device());
  }
  EXPECT_TRUE(here == RngState::capture({probe}));
}

TEST(Rng, ForgetsGeneratorsThatWereNotUsed) {
  const auto probe = torch::zeros({1}, on_device());
  auto state = RngState::capture({probe});
  const size_t all = state.states().size();
  state.forget_unchanged(RngState::capture_like(state));
  EXPECT_EQ(state.states().size(), 0u);

  state = RngState::capture({probe});
  torch::randn({4}, on_device());
  state.forget_unchanged(RngState::capture_like(state));
  EXPECT_EQ(state.states().size(), 1u);
  EXPECT_EQ(all, reprise::testing::device().is_cuda() ? 2u : 1u);
}

/// A training's budget counts tensors; neither taking nor putting back is to show there.
TEST(Rng, OfTheCpuTakesNoTensors) {
  count_cpu_memory();
  const MemoryMeter meter;
  const auto state = RngState::capture({});
  {
    const RngGuard guard(state);
    EXPECT_TRUE(RngState::capture_like(state) == state);
  }
  state.restore();
  EXPECT_EQ(meter.peak_increase_bytes(), 0);
}

/// The bytes that LibTorch itself writes, which saved runs hold.
TEST(Rng, StatesAreLibTorchsOwn) {
  torch::randn({3});  // an odd number leaves one of a pair for later
  const auto state = RngState::capture({});
  const auto own = at::detail::getDefaultCPUGenerator().get_state();
  ASSERT_EQ(state.states().size(), 1u);
  EXPECT_TRUE(torch::equal(state.states()[0], own));
  const auto first = torch::randn({101});
  const auto later = RngState::capture({});
  EXPECT_FALSE(later == state);
  const auto back = later.with_states(state.states());
  EXPECT_TRUE(back == state);
  back.restore();
  EXPECT_TRUE(torch::equal(first, torch::randn({101})));
}

TEST(Rng, CoversExtraGenerators) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
  const auto state = RngState::capture({}, {generator});
  const auto first = torch::rand({5}, generator);
  state.restore();
  EXPECT_TRUE(torch::equal(first, torch::rand({5}, generator)));
}

}  // namespace
}  // namespace reprise::compat
