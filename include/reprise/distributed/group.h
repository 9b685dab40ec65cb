#pragma once

#include <reprise/distributed/launch.h>

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
  RankInfo rank_info{};
  /// Device of the tensors that all_reduce(), all_to_all() and all_gather() take.
  torch::Device device{torch::kCPU};
  /// "gloo" or "nccl". If empty, nccl is used on CUDA if this build has it and
  /// every rank on this machine has a device of its own; otherwise gloo.
  std::string backend;
  /// Seconds without a heartbeat after which a rank is considered dead. At least
  /// 0.5.
  double timeout_s = 60;
  /// Seconds that join() waits for all ranks.
  double join_timeout_s = 300;
  /// Values that must be equal on all ranks, by name, such as versions and
  /// configuration.
  std::map<std::string, std::string> must_match{};
  /// Called on a background thread when another rank is dead, stuck or has
  /// failed. It must end the process, because calls that wait for that rank
  /// cannot be interrupted. The default prints one line to standard error and
  /// exits with status 1.
  std::function<void(const std::string&)> on_fault{};
};

/// The group of processes that run one training.
///
/// All members except rank(), size(), backend(), heartbeat(), pause_watchdog()
/// and fail() are collective: every rank must call them in the same order, from
/// one thread at a time. If a rank dies, a collective call on the other ranks
/// ends within the time-out; see RankGroupOptions::on_fault.
class RankGroup {
 public:
  /// Waits for all ranks and connects them. Throws c10::Error on every rank if a
  /// rank does not arrive in time or differs in `must_match`; the message names
  /// the rank. Sets SIGPIPE to be ignored unless the process has a handler, so
  /// that a broken connection is reported as an error.
  static std::shared_ptr<RankGroup> join(const RankGroupOptions& options);
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  /// Collective. Returns the ranks that passed the same number, in the order of this group,
  /// as a group with connections of its own. Failures are still those of this group, which
  /// must be the last to leave.
  std::shared_ptr<RankGroup> split(int part);

  int rank() const;
  int size() const;
  /// The backend in use: "gloo" or "nccl".
  const std::string& backend() const;

  /// Throws c10::Error on every rank if the values of any rank differ from those
  /// of rank 0.
  void require_same(const std::map<std::string, std::string>& values);

  /// Return the element-wise maximum or sum over all ranks. They use a separate
  /// CPU connection and never synchronize with the device.
  std::vector<int64_t> all_reduce_max(std::vector<int64_t> values);
  std::vector<double> all_reduce_sum(std::vector<double> values);

  /// Gathers `own` (n) of every rank into `all` (ranks, n). Both are contiguous
  /// double tensors on the CPU. Allocates no tensor, so that it cannot run out of
  /// memory on one rank only.
  void gather(const torch::Tensor& own, const torch::Tensor& all);

  /// Returns the text of rank 0; the argument of other ranks is ignored.
  std::string broadcast_text(const std::string& text);

  /// Copies the values of rank 0 into the tensors of all other ranks. The tensors
  /// may be on any device; types and sizes must be equal on all ranks.
  void broadcast(const std::vector<torch::Tensor>& tensors);

  /// Replaces the list of every other rank by a copy of rank 0's list, on the
  /// CPU. Other ranks need not know names or shapes.
  using NamedList = std::vector<std::pair<std::string, torch::Tensor>>;
  void broadcast_named(NamedList& tensors);

  /// Start asynchronous collectives on contiguous tensors on the group's device,
  /// using the group's backend. The tensors must stay alive until wait()
  /// returns. all_reduce() sums in place.
  compat::Work all_reduce(const torch::Tensor& tensor);
  compat::Work all_to_all(const torch::Tensor& output,
                          const torch::Tensor& input);
  ///
  /// Collectives of one lane are made in the same order on all ranks; those of different lanes
  /// may overlap in any order. The lane for parameters is connected at its first use.
  enum class Lane { kGradients, kParameters };
  compat::Work all_gather(const torch::Tensor& output,
                          const torch::Tensor& input,
                          Lane lane = Lane::kGradients);
  /// Waits for a collective of this group. Throws c10::Error if it failed.
  void wait(compat::Work& work);

  /// Reports progress of this rank and starts its watchdog: from now on, the
  /// other ranks treat it as stuck if the next heartbeat takes longer than the
  /// time-out. Time spent in collective calls is not counted.
  void heartbeat();
  /// Stops the watchdog until the next heartbeat.
  void pause_watchdog();

  /// Tells the other ranks that this rank ends with an error. Thread-safe; may
  /// be called more than once; never throws.
  void fail(const std::string& what) noexcept;

  /// Waits until all ranks have called leave(). No other member may be called
  /// afterwards. If the group is destroyed without it, the other ranks consider
  /// this rank dead.
  void leave();

 private:
  struct Impl;
  explicit RankGroup(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace reprise
