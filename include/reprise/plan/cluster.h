#pragma once

#include <reprise/plan/modes.h>
#include <reprise/plan/planner.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

/// Plans for several devices: what each of them holds, and what their communication costs.
/// Costs are those of one device, so that a cluster can be planned for without having it.
namespace reprise {

/// The network between ranks. Collectives are assumed to use a ring: each rank sends to the
/// next one, all at the same time, and every step costs the latency once.
struct Network {
  double bytes_per_ms = 0;  ///< of each rank, in each direction; 0: not known
  double latency_ms = 0;

  /// Time to gather or to reduce and scatter `bytes`, the size of the whole.
  double gather_ms(int64_t bytes, int ranks) const;
  /// Time to add up `bytes` on all ranks.
  double all_reduce_ms(int64_t bytes, int ranks) const {
    return 2 * gather_ms(bytes, ranks);
  }
};

/// Gradients of one window, in buckets that are sent while the last backward runs.
struct WindowTraffic {
  int64_t gradient_bytes = 0;
  int64_t parameter_bytes = 0;  ///< gathered after the update; 0: none are
  int64_t bucket_bytes = 0;
  double backward_ms = 0;  ///< of the last micro-batch
};

/// Time by which communication prolongs a window, besides the gathers of parameters while
/// stages run: what the last backward does not hide of the gradients, and updated parameters.
/// `gathering`: the network as gathers use it, if that differs from reductions.
double exposed_ms(const WindowTraffic& traffic, const Network& network,
                  Sharding shard, int ranks,
                  const std::optional<Network>& gathering = {});

/// Bytes that each rank sends in a window with `micro_batches` micro-batches. `gathers`: how
/// often a micro-batch gathers all parameters.
int64_t sent_bytes(int64_t gradient_bytes, int64_t parameter_bytes,
                   Sharding shard, int ranks, int64_t micro_batches,
                   double gathers = 2);

struct ClusterRequest {
  /// Sizes and budget of each device; `global_batch` is that of `ranks` ranks.
  PlanRequest plan;
  int ranks = 1;
  Network network;
  std::optional<Sharding> shard{};  ///< nullopt: the fastest that fits
  int64_t bucket_bytes = int64_t{25} << 20;
  /// Ranks that share one copy of the state; 0: all. Groups add up their gradients.
  int shard_group = 0;
};

/// The fastest plan for a number of ranks, with as many samples for each as in the request.
struct ClusterPoint {
  int ranks = 1;
  Sharding shard = Sharding::kNone;
  bool feasible = false;
  Plan plan;  ///< of each rank; its time includes waiting for parameters
  int64_t parameters = 0, gradients = 0, optimizer = 0;  ///< bytes per rank
  int64_t peak_bytes = 0;
  int64_t sent_bytes = 0;  ///< of each rank and window
  double exposed_ms = 0;   ///< see reprise::exposed_ms()
  double step_ms = 0;
  double samples_per_s = 0;  ///< of all ranks
  double efficiency = 0;  ///< speed of a rank against the fewest ranks that fit
};

struct ClusterPlan {
  ClusterRequest request;
  /// The levels at the requested number of ranks, fastest first.
  std::vector<ClusterPoint> levels;
  /// The fastest level for 1, 2, 4, … up to the larger of 1,024 and the requested number.
  std::vector<ClusterPoint> scaling;
};

/// Plans for the ranks of `request` from costs of one device.
ClusterPlan plan_cluster(const ClusterRequest& request, CostSource& costs);

/// Costs of a profile that was saved as JSON; see to_json(CostProfile). Sizes that were not
/// measured are interpolated. Throws c10::Error if `text` is not a profile.
std::unique_ptr<CostSource> saved_costs(const std::string& text);

/// Formats a plan for display, with what it assumes.
std::string to_text(const ClusterPlan& plan);
/// Returns a JSON object with the keys request, levels and scaling.
std::string to_json(const ClusterPlan& plan);

}  // namespace reprise
