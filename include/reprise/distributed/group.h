#pragma once

#include <reprise/distributed/rank_info.h>

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace reprise {

namespace compat {
class Work;
}

struct RankGroupOptions {
  RankInfo place{};
  torch::Device device{torch::kCPU};  ///< of the tensors that are reduced
  /// gloo, nccl; empty: nccl on CUDA where it was built in and no two ranks share a
  /// device, else gloo.
  std::string backend;
  /// Seconds without a sign of life after which a rank counts as gone; 0.5 or more.
  double timeout_s = 60;
  /// Seconds that all ranks may take to arrive.
  double join_timeout_s = 300;
  /// What all ranks must have in common, by name: versions, configuration.
  std::map<std::string, std::string> same{};
  /// Called on a thread of its own when another rank is gone, stuck or has failed.
  /// Must end the process: whatever waits for that rank cannot be woken. Default:
  /// prints one line to standard error and exits with status 1.
  std::function<void(const std::string&)> on_fault{};
};

/// The processes of one training. Every call that all ranks take part in (all but
/// rank(), size() and fail()) is made by all of them in the same order, by one thread
/// at a time. A call that waits for the others ends, one way or another, within the
/// time-out after one of them has died: see `on_fault`.
class RankGroup {
 public:
  /// Waits for all ranks. Throws c10::Error, on every rank, where one has not arrived
  /// or differs in `same`, with its number. From now on this process ignores SIGPIPE,
  /// unless it has a handler: connections to ranks that are gone are errors.
  static std::shared_ptr<RankGroup> join(const RankGroupOptions& options);
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  int rank() const;
  int size() const;
  const std::string& backend() const;

  /// Throws c10::Error, on every rank, where a rank's values differ from rank 0's.
  void require_same(const std::map<std::string, std::string>& values);

  /// Of each number the largest, or the sum, over all ranks. Through the host, on
  /// connections of its own: waits for no device.
  std::vector<int64_t> all_reduce_max(std::vector<int64_t> values);
  std::vector<double> all_reduce_sum(std::vector<double> values);

  /// The `own` (n) of all ranks into `all` (ranks, n): doubles on the host, contiguous.
  /// Allocates no tensor, so that it cannot fail on one rank alone.
  void gather(const torch::Tensor& own, const torch::Tensor& all);

  /// Rank 0's text; what the others give is ignored.
  std::string broadcast_text(const std::string& text);

  /// Rank 0's values, into the tensors of all others; on any device. Ranks have
  /// tensors of the same types and sizes.
  void broadcast(const std::vector<torch::Tensor>& tensors);

  /// The same, for what others do not know the shapes of: their list is replaced by
  /// one on the host.
  using NamedList = std::vector<std::pair<std::string, torch::Tensor>>;
  void broadcast_named(NamedList& tensors);

  /// Collectives on the device's tensors, contiguous, by the backend. They run beside
  /// the caller; wait() with the group's.
  compat::Work sum(const torch::Tensor& tensor);
  compat::Work all_to_all(const torch::Tensor& output,
                          const torch::Tensor& input);
  compat::Work all_gather(const torch::Tensor& output,
                          const torch::Tensor& input);
  void wait(compat::Work& work);

  /// This rank's work has come a step further, as it must within each time-out from
  /// now on; pause_watchdog(): no longer, until the next step.
  void heartbeat();
  void pause_watchdog();

  /// Tells the others that this rank ends with an error. May be called at any time,
  /// and again; never throws.
  void fail(const std::string& what) noexcept;

  /// At a good end: waits until all ranks are there. Nothing else may be called after
  /// that. Without it the destructor's end looks like a death to the others.
  void leave();

 private:
  struct Impl;
  explicit RankGroup(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace reprise
