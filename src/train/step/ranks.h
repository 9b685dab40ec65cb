#pragma once

#include <reprise/data/safetensors.h>
#include <reprise/distributed/group.h>

#include <torch/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace reprise::detail {

/// The processes of a training. There are two implementations: a single
/// process, for which every collective returns its argument, and the processes
/// of a RankGroup. All ranks must make the same calls in the same order, except
/// for rank(), size(), first() and fail().
class Ranks {
 public:
  virtual ~Ranks() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  bool first() const { return rank() == 0; }

  /// Whether a training can stop between two micro-batches of a window. With
  /// several processes it stops between windows only.
  virtual bool can_stop_in_window() const = 0;

  /// Collectives; see RankGroup.
  virtual std::vector<int64_t> all_reduce_max(std::vector<int64_t> values) = 0;
  virtual std::vector<double> all_reduce_sum(std::vector<double> values) = 0;
  virtual std::string broadcast_text(const std::string& text) = 0;
  virtual void broadcast(const std::vector<torch::Tensor>& tensors) = 0;
  virtual void broadcast_named(NamedTensors& tensors) = 0;
  virtual void require_same(
      const std::map<std::string, std::string>& values) = 0;

  /// Reports progress of this rank. The other ranks consider it dead if it does
  /// not do so within the time-out, unless pause_watchdog() was called.
  virtual void heartbeat() = 0;
  virtual void pause_watchdog() = 0;

  /// Tells the other ranks that this one ends with an error. Never throws.
  virtual void fail(const std::string& what) noexcept = 0;

  /// Returns the group of processes; null for a single process.
  virtual std::shared_ptr<RankGroup> group() const = 0;

  /// Returns whether `value` is true on any rank.
  bool any(bool value) { return all_reduce_max({value ? 1 : 0}).at(0) > 0; }
};

/// Returns the ranks of `group`, or a single process if it is null.
std::unique_ptr<Ranks> make_ranks(std::shared_ptr<RankGroup> group);

}  // namespace reprise::detail
