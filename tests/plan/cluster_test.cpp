#include "fake_cost_source.h"
#include "support.h"

#include <reprise/plan/cluster.h>

#include <nlohmann/json.hpp>

namespace reprise::testing {
namespace {

ClusterRequest request_for(int ranks) {
  ClusterRequest request;
  request.ranks = ranks;
  request.plan.global_batch = 16 * ranks;
  request.network = {1e5, 0.01};
  request.bucket_bytes = 2 * kMiB;
  return request;
}

/// The fake device with its parameters by stage.
class ClusterCosts final : public CostSource {
 public:
  const CostProfile& profile(Precision precision) override {
    CostProfile& copy = copies_[precision];
    copy = inner_.profile(precision);
    copy.stage_parameter_bytes.assign(kStages, 2 * kMiB);
    return copy;
  }
  bool measure(Precision precision, int64_t b) override {
    return inner_.measure(precision, b);
  }

 private:
  FakeCostSource inner_;
  std::map<Precision, CostProfile> copies_;
};

TEST(Network, RingsTakeTheirSteps) {
  const Network network{1000, 0.5};
  EXPECT_EQ(network.gather_ms(4000, 1), 0);
  // Three steps of a quarter each.
  EXPECT_DOUBLE_EQ(network.gather_ms(4000, 4), 3 * (0.5 + 1));
  EXPECT_DOUBLE_EQ(network.all_reduce_ms(4000, 4), 6 * (0.5 + 1));
}

TEST(Network, TheBackwardHidesGradients) {
  const Network network{1000, 0};
  WindowTraffic traffic{
      .gradient_bytes = 8000, .bucket_bytes = 1000, .backward_ms = 0};
  // Two ranks, each of which sends all but its half, twice.
  EXPECT_DOUBLE_EQ(exposed_ms(traffic, network, Sharding::kNone, 2), 8);
  EXPECT_DOUBLE_EQ(exposed_ms(traffic, network, Sharding::kGradients, 2), 4);
  traffic.backward_ms = 8;  // seven eighths of it hide buckets
  EXPECT_DOUBLE_EQ(exposed_ms(traffic, network, Sharding::kNone, 2), 1);
  traffic.backward_ms = 100;  // the last bucket is never hidden
  EXPECT_DOUBLE_EQ(exposed_ms(traffic, network, Sharding::kNone, 2), 1);
  traffic.parameter_bytes = 8000;
  EXPECT_DOUBLE_EQ(exposed_ms(traffic, network, Sharding::kOptimizer, 2),
                   0.5 + 4);
}

TEST(Network, CountsBytes) {
  EXPECT_EQ(sent_bytes(1000, 1000, Sharding::kNone, 4, 3), 1500);
  EXPECT_EQ(sent_bytes(1000, 1000, Sharding::kOptimizer, 4, 3), 1500);
  EXPECT_EQ(sent_bytes(1000, 1000, Sharding::kParameters, 4, 3),
            750 + 3 * 1500);
  EXPECT_EQ(sent_bytes(1000, 1000, Sharding::kParameters, 1, 3), 0);
}

TEST(Cluster, DividesStateAmongRanks) {
  ClusterCosts costs;
  for (const Sharding shard : {Sharding::kNone, Sharding::kOptimizer,
                               Sharding::kGradients, Sharding::kParameters}) {
    ClusterRequest request = request_for(4);
    request.shard = shard;
    const ClusterPoint point = plan_cluster(request, costs).levels.at(0);
    EXPECT_EQ(point.shard, shard);
    EXPECT_EQ(point.optimizer, (shard == Sharding::kNone ? 24 : 6) * kMiB);
    EXPECT_EQ(point.parameters,
              (shard == Sharding::kParameters ? 3 : 12) * kMiB);
    EXPECT_EQ(point.plan.global_batch, 16);
    EXPECT_GT(point.step_ms, point.plan.step_ms);
  }
}

TEST(Cluster, AModelThatFitsNoDeviceFitsMany) {
  ClusterCosts costs;
  ClusterRequest request = request_for(16);
  request.plan.memory = 40 * kMiB;  // the state alone has 48
  const ClusterPlan plan = plan_cluster(request, costs);
  ASSERT_TRUE(plan.levels.at(0).feasible);
  EXPECT_LE(plan.levels[0].peak_bytes, 40 * kMiB);
  EXPECT_FALSE(plan.scaling.at(0).feasible);
  EXPECT_EQ(plan.scaling.size(), 11u);  // to 1,024
  EXPECT_TRUE(plan.scaling.back().feasible);
  EXPECT_NE(to_text(plan).find("does not fit"), std::string::npos);
  const auto json = nlohmann::json::parse(to_json(plan));
  EXPECT_EQ(json.at("scaling").size(), 11u);
}

TEST(Cluster, FasterNetworksAreNotSlower) {
  ClusterCosts costs;
  double before = 1e9;
  for (const double rate : {1e2, 1e4, 1e6}) {
    ClusterRequest request = request_for(8);
    request.shard = Sharding::kParameters;
    request.network.bytes_per_ms = rate;
    const double ms = plan_cluster(request, costs).levels.at(0).step_ms;
    EXPECT_LT(ms, before);
    before = ms;
  }
}

TEST(Cluster, MoreRanksAreLessEfficient) {
  ClusterCosts costs;
  ClusterRequest request = request_for(8);
  request.shard = Sharding::kNone;  // nothing becomes smaller
  double before = 1 + 1e-9;
  for (const ClusterPoint& point : plan_cluster(request, costs).scaling) {
    EXPECT_LE(point.efficiency, before);
    before = point.efficiency;
  }
  EXPECT_LT(before, 0.9);
}

TEST(Cluster, RejectsWhatCannotBeDivided) {
  ClusterCosts costs;
  ClusterRequest request = request_for(4);
  request.plan.global_batch = 3;
  EXPECT_NE(error_of([&] { plan_cluster(request, costs); }).find("--global"),
            std::string::npos);
  request = request_for(4);
  request.shard_group = 3;
  EXPECT_NE(error_of([&] { plan_cluster(request, costs); }).find("--shard-g"),
            std::string::npos);
}

}  // namespace
}  // namespace reprise::testing
