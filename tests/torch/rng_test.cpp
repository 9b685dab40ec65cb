#include "support.h"

#include <reprise/torch/rng.h>

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

TEST(Rng, CoversExtraGenerators) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
  const auto state = RngState::capture({}, {generator});
  const auto first = torch::rand({5}, generator);
  state.restore();
  EXPECT_TRUE(torch::equal(first, torch::rand({5}, generator)));
}

}  // namespace
}  // namespace reprise::compat
