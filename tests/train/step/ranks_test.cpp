// Also tests the WindowExchange of a single process. That of several ranks is
// tested by distributed/ranked_training_test.cpp and
// distributed/sync_batch_norm_test.cpp.
#include "train/step/ranks.h"

#include "support.h"

#include <gtest/gtest.h>

namespace reprise::detail {
namespace {

TEST(Ranks, SingleProcessCollectivesReturnTheirArgument) {
  const auto ranks = make_ranks(nullptr);
  EXPECT_EQ(ranks->rank(), 0);
  EXPECT_EQ(ranks->size(), 1);
  EXPECT_TRUE(ranks->first());
  EXPECT_TRUE(ranks->can_stop_in_window());
  EXPECT_EQ(ranks->group(), nullptr);
  EXPECT_EQ(ranks->all_reduce_max({3, -1}), (std::vector<int64_t>{3, -1}));
  EXPECT_EQ(ranks->all_reduce_sum({0.5}), (std::vector<double>{0.5}));
  EXPECT_EQ(ranks->broadcast_text("plan"), "plan");
  EXPECT_TRUE(ranks->any(true));
  EXPECT_FALSE(ranks->any(false));
  const torch::Tensor tensor = torch::ones({2});
  ranks->broadcast({tensor});
  EXPECT_TRUE(torch::equal(tensor, torch::ones({2})));
}

}  // namespace
}  // namespace reprise::detail
