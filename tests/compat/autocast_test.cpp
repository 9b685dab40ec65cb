#include "compat/autocast.h"

#include "support.h"

namespace reprise::compat {
namespace {

TEST(Autocast, GuardSetsAndPutsBack) {
  const auto before = AutocastState::current();
  EXPECT_FALSE(before.cpu_enabled);
  AutocastState state = before;
  state.cpu_enabled = true;
  state.cpu_dtype = c10::ScalarType::BFloat16;
  const auto a = torch::ones({4, 4});
  {
    const AutocastGuard guard(state);
    EXPECT_TRUE(AutocastState::current() == state);
    EXPECT_EQ(torch::mm(a, a).scalar_type(), torch::kBFloat16);
  }
  EXPECT_TRUE(AutocastState::current() == before);
  EXPECT_EQ(torch::mm(a, a).scalar_type(), torch::kFloat);
}

}  // namespace
}  // namespace reprise::compat
