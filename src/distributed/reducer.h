#pragma once

#include <reprise/distributed/group.h>

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace reprise {

struct ReducerOptions {
  /// Maximum size of a bucket in bytes. A larger gradient has its own bucket.
  int64_t bucket_bytes = int64_t{25} << 20;
  /// Sends gradients as bfloat16, which halves the traffic. Each rank sums its
  /// share of the values in the parameters' precision and rounds the sums once
  /// more to send them.
  bool bf16 = false;
  /// Each rank receives only the sums for its shard of the values; see shards().
  bool shard = false;
  /// Buckets that may be on the way at a time; 0 for any number. The backward waits before
  /// it starts another, so that gradients do not exist all at once.
  int most_in_flight = 0;
  /// With `shard`, if there are several groups that each have all values: the ranks of all
  /// groups that have the same shard, whose sums are added up, and the ranks of all groups.
  std::shared_ptr<RankGroup> replicas{};
  std::shared_ptr<RankGroup> everyone{};
};

namespace detail {
class ParameterShards;
struct SentBucket;
}  // namespace detail

/// Sums the gradients of all ranks once per accumulation window. Gradients are
/// copied into flat buckets, which are reduced while the last backward of the
/// window is still running.
///
///     GradientReducer reducer(group, parameters, options);
///     // For the last micro-batch of the window:
///     Execution execution(chain, schedule, {.cuts = reducer.cuts(),
///         .final_from = [&](int stage) { reducer.final_from(stage); }});
///     ...
///     reducer.backward_ended();
///     reducer.finish(loss_sum);  // Waits; `.grad` now holds the sums.
///
/// Buckets follow the order in which the backward completes parameters, last
/// stage first. A bucket starts as soon as all of its gradients are final, so all
/// ranks start the same buckets in the same order. A rank without a micro-batch
/// takes part by calling finish() only.
///
/// A parameter without a gradient on this rank counts as zero. A parameter
/// without a gradient on any rank has none afterwards. Not thread-safe.
class GradientReducer {
 public:
  struct Parameter {
    std::string name;
    torch::Tensor tensor;
    int first_stage = 0;  ///< first stage that uses the parameter
    // Of ShardedParameters; otherwise of no importance.
    int unit = 0;
    bool halved = false;  ///< may be gathered in half precision
  };

  GradientReducer(std::shared_ptr<RankGroup> group,
                  const std::vector<Parameter>& parameters,
                  const ReducerOptions& options = {});
  /// Reduces the gradients of parameters that are divided among the ranks, in their buckets.
  GradientReducer(std::shared_ptr<RankGroup> group,
                  std::shared_ptr<detail::ParameterShards> shards,
                  const ReducerOptions& options);
  ~GradientReducer();
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  /// Stages at which the chain's autograd graph should be cut so that buckets
  /// start early.
  const std::vector<int>& cuts() const;

  /// Declares the gradients of all parameters whose first stage is `stage` or
  /// later to be final, and starts their buckets. Releases these gradients unless
  /// keep_gradients() is on.
  void final_from(int stage);

  /// Declares the backward of this window to be complete. Communication after
  /// this call is counted as exposed.
  void backward_ended();

  /// Starts the remaining buckets, waits for all of them and stores the sums in
  /// `.grad` of the parameters or, with `shard`, of the shards; the gradients of
  /// the parameters are then released. Returns the sum over all ranks of `loss`,
  /// a scalar on the device.
  torch::Tensor finish(const torch::Tensor& loss);

  /// Completes a window that this rank could not compute. The remaining buckets
  /// are sent as zeros. The caller must tell all ranks to discard the sums.
  void abandon_window();
  /// Like final_from() in a window that this rank could not compute, if the other ranks wait
  /// for buckets before the end of the window.
  void abandon_from(int stage);

  /// If on, `.grad` tensors keep their storage and receive the sums in place. If
  /// off, which is the default, they become views of the buckets.
  void keep_gradients(bool keep);

  /// With `shard`: this rank's shard of the parameters, as views, at most one per
  /// parameter. finish() sets their `.grad`. Empty without `shard`.
  const std::vector<std::pair<std::string, torch::Tensor>>& shards() const;
  /// Collective. Copies the updated shards of all ranks into the parameters.
  /// reserve_gather() allocates its memory, and may fail.
  void reserve_gather();
  void all_gather_parameters();

  /// Collective, with `shard`. Gathers optimizer state kept per shard into full
  /// tensors with the shapes of the parameters, on the CPU of rank 0. Other ranks
  /// get an empty list. A state is named prefix + parameter name; `prefixes` must
  /// be equal on all ranks. A prefix for which no rank has values is left out.
  using NamedList = std::vector<std::pair<std::string, torch::Tensor>>;
  NamedList gather_full(const NamedList& shard_values,
                        const std::vector<std::string>& prefixes);
  /// The inverse of gather_full(): returns this rank's shards of full tensors.
  /// Entries that do not belong to a parameter are returned unchanged.
  NamedList select_shards(const NamedList& full,
                          const std::vector<std::string>& prefixes) const;

  /// With `shard`: the pieces of the parameters; null without it.
  const detail::ParameterShards* parameter_shards() const;

  /// Bytes of all gradients.
  int64_t gradient_bytes() const;
  /// Number of buckets.
  int64_t buckets() const;
  /// The buckets, in the order in which they are sent.
  std::vector<detail::SentBucket> sent_buckets() const;

  struct Counters {
    int64_t windows = 0;
    int64_t calls = 0;          ///< collectives that reduced gradients
    int64_t bytes = 0;          ///< gradient bytes sent by these collectives
    int64_t replica_bytes = 0;  ///< sums that were added up between groups
    /// Seconds during which a collective was in progress, and the part of them
    /// after backward_ended(). Measured with Gloo only.
    double busy_s = 0;
    double exposed_s = 0;
    int64_t gather_calls = 0;  ///< of all_gather_parameters()
    int64_t gather_bytes = 0;  ///< in these buckets
  };
  const Counters& counters() const;
  /// Number of buckets started in the current window.
  int64_t started() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace reprise
