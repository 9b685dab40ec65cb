#include "plan/update_cuts.h"

#include <gtest/gtest.h>

namespace reprise::detail {
namespace {

using Cuts = std::vector<int>;

TEST(UpdateCuts, CutsBeforeEveryLargeStage) {
  EXPECT_EQ(update_cuts({100, 100, 100, 100}), (Cuts{3, 2, 1}));
  EXPECT_EQ(update_cuts({100}), Cuts{});
  EXPECT_EQ(update_cuts({}), Cuts{});
}

TEST(UpdateCuts, JoinsStagesWithFewGradients) {
  // An eighth of the largest is enough for a graph of its own.
  EXPECT_EQ(update_cuts({0, 800, 0, 40, 60, 0, 800}), (Cuts{6, 3, 1}));
  // Those of the last set are below it, and belong to the stage before.
  EXPECT_EQ(update_cuts({800, 0, 99}), Cuts{});
}

TEST(UpdateCuts, MakesNoCutsWithoutGradients) {
  EXPECT_EQ(update_cuts({0, 0, 0}), Cuts{});
}

}  // namespace
}  // namespace reprise::detail
