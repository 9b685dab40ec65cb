// Tested by tests/plan/cluster_test.cpp.
#include "plan/exchange_memory.h"

#include <reprise/plan/cluster.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

namespace reprise {
namespace {

constexpr int kMostDrawn = 1024;  // ranks

int64_t sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

/// Ranks that share one copy of the state.
int sharing_ranks(const ClusterRequest& request, int ranks) {
  return request.shard_group > 0 ? std::min(request.shard_group, ranks) : ranks;
}

/// Gradients in the order of a backward, in buckets of at most `bytes`.
std::vector<detail::SentBucket> buckets_of(const CostProfile& profile,
                                           int64_t bytes) {
  std::vector<detail::SentBucket> buckets;
  const auto& gradients = profile.gradient_bytes;
  for (size_t i = gradients.size(); i-- > 0;) {
    for (int64_t left = gradients[i]; left > 0;) {
      if (buckets.empty() || buckets.back().bytes >= bytes) {
        buckets.push_back({});
      }
      detail::SentBucket& last = buckets.back();
      const int64_t part = std::min(left, bytes - last.bytes);
      last.bytes += part;
      last.gradient_bytes += part;
      last.ready_stage = static_cast<int>(i);
      left -= part;
    }
  }
  return buckets;
}

/// Costs of a rank, from those of a device by itself.
class RankCosts final : public CostSource {
 public:
  RankCosts(CostSource& inner, const ClusterRequest& request, Sharding shard,
            int ranks)
      : inner_(inner), request_(request), shard_(shard), ranks_(ranks) {}

  const CostProfile& profile(Precision precision) override {
    return divided_[precision] = divided(inner_.profile(precision));
  }
  bool measure(Precision precision, int64_t micro_batch) override {
    return inner_.measure(precision, micro_batch);
  }

 private:
  CostProfile divided(CostProfile profile) const {
    profile.tried.clear();  // without waiting for other ranks
    profile.update = UpdateMode::kAfter;
    profile.final_gradient_bytes.clear();
    const int sharing = sharing_ranks(request_, ranks_);
    if (ranks_ > 1) add_exchange(profile, sharing);
    if (shard_ == Sharding::kNone) return profile;
    profile.fixed.optimizer /= sharing;
    profile.update_ms /= sharing;
    if (shard_ != Sharding::kParameters) return profile;
    profile.fixed.parameters /= sharing;
    profile.graph = GraphMode::kOff;
    profile.gathers_parameters = true;
    profile.moved_bytes = profile.stage_parameter_bytes;
    profile.moved_gradient_bytes.assign(profile.moved_bytes.size(), 0);
    const Network& network = request_.network;
    if (sharing > 1) {
      profile.gather_delay_ms = (sharing - 1) * network.latency_ms;
      profile.to_device_bytes_per_ms =
          network.bytes_per_ms * sharing / (sharing - 1);
    }
    return profile;
  }

  void add_exchange(CostProfile& profile, int sharing) const {
    const int stages = static_cast<int>(profile.gradient_bytes.size());
    const auto buckets = buckets_of(profile, request_.bucket_bytes);
    detail::ExchangeRules rules = detail::rules_of(shard_, sharing);
    profile.exchange = detail::exchange_memory(buckets, stages, rules);
    rules.keeps_gradients = true;
    profile.exchange_of_graph = detail::exchange_memory(buckets, stages, rules);
  }

  CostSource& inner_;
  const ClusterRequest& request_;
  Sharding shard_;
  int ranks_;
  std::map<Precision, CostProfile> divided_;
};

/// Costs of a profile, whatever precision is asked for.
class SavedCosts final : public CostSource {
 public:
  explicit SavedCosts(CostProfile profile) : profile_(std::move(profile)) {
    TORCH_CHECK(!profile_.sizes.empty(),
                "[--profile] expected a profile with measurements, got one "
                "without");
    profile_.tried.clear();
  }
  const CostProfile& profile(Precision precision) override {
    TORCH_CHECK(precision == profile_.precision,
                "[--profile] the profile is in ", to_text(profile_.precision),
                "; use --precision ", to_text(profile_.precision));
    return profile_;
  }
  bool measure(Precision, int64_t micro_batch) override {
    if (!profile_.measured(micro_batch)) {
      SizeCosts size = profile_.at(micro_batch);
      size.micro_batch = micro_batch;
      profile_.add(std::move(size));
    }
    return true;
  }

 private:
  CostProfile profile_;
};

double backward_ms(const CostProfile& profile, int64_t micro_batch) {
  double ms = 0;
  for (const auto& stage : profile.at(micro_batch).chain_costs.stages) {
    ms += stage.backward_ms;
  }
  return ms;
}

ClusterPoint point_of(const ClusterRequest& request, CostSource& costs,
                      Sharding shard, int ranks) {
  const int sharing = sharing_ranks(request, ranks);
  RankCosts rank_costs(costs, request, shard, ranks);
  PlanRequest wanted = request.plan;
  wanted.global_batch =
      (request.plan.global_batch + request.ranks - 1) / request.ranks;
  wanted.explain = false;
  const CostProfile& alone = costs.profile(wanted.precisions.front());
  const int64_t gradients = sum(alone.gradient_bytes);
  const PlanResult result = make_plan(wanted, rank_costs);
  ClusterPoint point{ranks, shard, result.feasible, result.plan};
  const CostProfile& own = rank_costs.profile(result.plan.precision);
  point.parameters = own.fixed.parameters;
  point.optimizer = own.fixed.optimizer;
  const bool once = shard > Sharding::kOptimizer && result.plan.accumulate == 1;
  point.gradients = once ? gradients / sharing : gradients;
  point.peak_bytes = result.plan.peak_bytes;
  WindowTraffic traffic{
      .gradient_bytes = gradients,
      .parameter_bytes =
          shard == Sharding::kOptimizer || shard == Sharding::kGradients
              ? gradients
              : 0,
      .bucket_bytes = request.bucket_bytes,
      .backward_ms = backward_ms(own, result.plan.last_micro_batch)};
  point.exposed_ms = exposed_ms(traffic, request.network, shard, sharing);
  if (sharing < ranks) {
    // Groups add up their shares.
    point.exposed_ms += request.network.all_reduce_ms(
        gradients / (shard == Sharding::kNone ? 1 : sharing), ranks / sharing);
  }
  const int64_t parameters =
      sum(alone.stage_wire_bytes.empty() ? alone.stage_parameter_bytes
                                         : alone.stage_wire_bytes);
  point.sent_bytes =
      sent_bytes(gradients, parameters, shard, sharing, result.plan.accumulate);
  point.step_ms = result.plan.step_ms + point.exposed_ms;
  point.samples_per_s = 1000 * static_cast<double>(wanted.global_batch) *
                        ranks / std::max(point.step_ms, 1e-9);
  return point;
}

bool better(const ClusterPoint& a, const ClusterPoint& b) {
  if (a.feasible != b.feasible) return a.feasible;
  return a.feasible ? a.step_ms < b.step_ms : a.peak_bytes < b.peak_bytes;
}

std::vector<Sharding> levels_of(const ClusterRequest& request, int ranks) {
  if (ranks == 1) return {Sharding::kNone};
  if (request.shard) return {*request.shard};
  return {Sharding::kNone, Sharding::kOptimizer, Sharding::kGradients,
          Sharding::kParameters};
}

std::vector<ClusterPoint> points_of(const ClusterRequest& request,
                                    CostSource& costs, int ranks) {
  std::vector<ClusterPoint> points;
  for (const Sharding shard : levels_of(request, ranks)) {
    points.push_back(point_of(request, costs, shard, ranks));
  }
  std::stable_sort(points.begin(), points.end(), better);
  return points;
}

}  // namespace

double Network::gather_ms(int64_t bytes, int ranks) const {
  if (ranks < 2 || bytes == 0) return 0;
  const double steps = ranks - 1;
  const double sending =
      bytes_per_ms > 0 ? static_cast<double>(bytes) / ranks / bytes_per_ms : 0;
  return steps * (latency_ms + sending);
}

double exposed_ms(const WindowTraffic& traffic, const Network& network,
                  Sharding shard, int ranks,
                  const std::optional<Network>& gathering) {
  if (ranks < 2 || traffic.gradient_bytes == 0) return 0;
  const int64_t bucket =
      std::clamp<int64_t>(traffic.bucket_bytes, 1, traffic.gradient_bytes);
  const int64_t buckets = (traffic.gradient_bytes + bucket - 1) / bucket;
  const auto ms_of = [&](int64_t bytes) {
    return shard == Sharding::kNone ? network.all_reduce_ms(bytes, ranks)
                                    : network.gather_ms(bytes, ranks);
  };
  const double one = ms_of(bucket);
  const double all = one * static_cast<double>(buckets - 1) +
                     ms_of(traffic.gradient_bytes - (buckets - 1) * bucket);
  // The first bucket starts when its part of the backward is done, the last one at the end.
  const double hidden = traffic.backward_ms * static_cast<double>(buckets - 1) /
                        static_cast<double>(buckets);
  return std::max(one, all - hidden) +
         gathering.value_or(network).gather_ms(traffic.parameter_bytes, ranks);
}

int64_t sent_bytes(int64_t gradient_bytes, int64_t parameter_bytes,
                   Sharding shard, int ranks, int64_t micro_batches,
                   double gathers) {
  // A gather and a reduce-scatter send all but a rank's own share.
  const auto others = [ranks](double bytes) {
    return static_cast<int64_t>(bytes * (ranks - 1) / ranks);
  };
  const auto gradients = static_cast<double>(gradient_bytes);
  switch (shard) {
    case Sharding::kNone:
      return others(2 * gradients);
    case Sharding::kOptimizer:
    case Sharding::kGradients:
      return others(2 * gradients);  // gradients one way, parameters the other
    case Sharding::kParameters:
      return others(gradients + gathers * static_cast<double>(micro_batches) *
                                    static_cast<double>(parameter_bytes));
  }
  return 0;
}

std::unique_ptr<CostSource> saved_costs(const std::string& text) {
  CostProfile profile = profile_from_json(text);
  TORCH_CHECK(!profile.stages.empty() && !profile.sizes.empty(),
              "[profile_from_json] not a cost profile: expected stages and "
              "measured sizes, got none");
  return std::make_unique<SavedCosts>(std::move(profile));
}

ClusterPlan plan_cluster(const ClusterRequest& request, CostSource& costs) {
  TORCH_CHECK(request.ranks >= 1, "[--ranks] expected 1 or more, got ",
              request.ranks);
  TORCH_CHECK(request.plan.global_batch >= request.ranks,
              "[--global-batch] expected a sample for each of ", request.ranks,
              " ranks, got ", request.plan.global_batch);
  TORCH_CHECK(
      request.shard_group == 0 || request.ranks % request.shard_group == 0,
      "[--shard-group] expected a divisor of ", request.ranks, " ranks, got ",
      request.shard_group);
  ClusterPlan plan{request, points_of(request, costs, request.ranks), {}};
  for (int ranks = 1; ranks <= std::max(kMostDrawn, request.ranks);
       ranks *= 2) {
    plan.scaling.push_back(points_of(request, costs, ranks).front());
  }
  const ClusterPoint* first = nullptr;
  for (ClusterPoint& point : plan.scaling) {
    if (!point.feasible) continue;
    if (first == nullptr) first = &point;
    point.efficiency =
        point.samples_per_s / point.ranks * first->ranks / first->samples_per_s;
  }
  for (ClusterPoint& point : plan.levels) {
    if (point.feasible && first != nullptr) {
      point.efficiency = point.samples_per_s / point.ranks * first->ranks /
                         first->samples_per_s;
    }
  }
  return plan;
}

}  // namespace reprise
