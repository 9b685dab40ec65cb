// The expected figures are counted by hand.
#include "plan/gradient_costs.h"

#include "support.h"

#include <reprise/recompute/strategy.h>

namespace reprise {
namespace {

/// Two stages whose parameters are in host memory.
CostProfile moved_profile() {
  CostProfile profile;
  profile.stages = {"a", "b"};
  profile.gradient_bytes = profile.held_twice_bytes =
      profile.final_gradient_bytes = profile.stage_update_bytes = {0, 0};
  profile.moved_bytes = {100, 200};
  profile.moved_gradient_bytes = {100, 200};
  return profile;
}

ChainCosts two_stages() {
  return ChainCosts::simple(10,
                            {StageCosts::simple(10), StageCosts::simple(10)});
}

int64_t peak_of(const ChainCosts& costs) {
  return simulate(make_schedule("none", 2), costs).peak_bytes;
}

TEST(GradientCosts, CountsMovedParametersThatAreUpdated) {
  // In the backward of 'a': its weights; the weights and gradients of 'b', on their way out; both
  // outputs, and the gradients of the output and the input of 'a'. Its own gradients come later,
  // since the costs of the stage have none.
  EXPECT_EQ(peak_of(detail::updating_costs(two_stages(), moved_profile())),
            100 + 400 + 40);
  CostProfile with_temporaries = moved_profile();
  with_temporaries.stage_update_bytes = {5, 1000};
  // The update of 'b' with its weights, gradients and temporaries; the weights of 'a', the
  // output of 'a' and its gradient, and the chain's output.
  EXPECT_EQ(peak_of(detail::updating_costs(two_stages(), with_temporaries)),
            1000 + 400 + 100 + 10 + 10 + 10);
}

TEST(GradientCosts, CountsMovedGradientsThatAreAddedTo) {
  // In the backward of 'b': all weights and gradients, and both outputs with their gradients.
  EXPECT_EQ(peak_of(detail::accumulating_costs(two_stages(), moved_profile(),
                                               /*first=*/false)),
            600 + 40);
}

// The gradient of the output of 'b' exists during its whole backward, so that this can be
// repeated, if it has at most 1/32 of the bytes of the parameters' gradients.
TEST(GradientCosts, CountsGradientsThatAreHeldToContinue) {
  CostProfile profile = moved_profile();
  profile.moved_bytes.clear();
  profile.moved_gradient_bytes.clear();
  profile.final_gradient_bytes = {160, 159};
  const int64_t without =
      peak_of(detail::updating_costs(two_stages(), profile));
  profile.final_gradient_bytes = {160, 160};
  EXPECT_EQ(peak_of(detail::updating_costs(two_stages(), profile)),
            without + 10);
}

TEST(GradientCosts, WaitsForCopies) {
  CostProfile profile = moved_profile();
  profile.to_device_bytes_per_ms = 10;
  profile.to_host_bytes_per_ms = 100;
  const ChainCosts costs =
      detail::accumulating_costs(two_stages(), profile, /*first=*/true);
  // Forward: the weights of 'b' arrive. Backward: those of 'a' arrive; both leave.
  EXPECT_EQ(costs.stages[0].forward_ms, 20);
  EXPECT_EQ(costs.stages[1].forward_ms, 1);
  EXPECT_EQ(costs.stages[1].backward_ms, 10);
  EXPECT_EQ(costs.stages[0].backward_ms, 2);
  profile.to_host_bytes_per_ms = 1;
  EXPECT_EQ(detail::accumulating_costs(two_stages(), profile, true)
                .stages[1]
                .backward_ms,
            400);
}

TEST(GradientCosts, AddsNothingWithoutMovedParameters) {
  CostProfile profile = moved_profile();
  profile.moved_bytes.clear();
  EXPECT_EQ(peak_of(detail::accumulating_costs(two_stages(), profile, false)),
            peak_of(two_stages()));
  EXPECT_EQ(detail::graphs_of_updates(profile), 1);
  EXPECT_EQ(detail::graphs_of_updates(moved_profile()), 2);
}

}  // namespace
}  // namespace reprise
