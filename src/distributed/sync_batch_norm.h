#pragma once

#include <reprise/distributed/group.h>
#include <reprise/ops/batch_norm.h>

#include <cstdint>
#include <memory>

namespace reprise {

/// The ranks of a group as peers of BatchNorm, window by window.
///
///     const auto norms = std::make_shared<SyncBatchNormGroup>(group, max_channels);
///     norms->open();
///     {
///       const SyncBatchNormScope scope(norms);  // per micro-batch
///       …
///     }
///     norms->close();
///
/// Exchanges statistics between the hosts, over the group's control connections. All
/// messages have the same size, so that a rank whose window has failed can tell the others
/// at whichever norm they are: fail() sends its next message, and makes theirs throw. All
/// ranks therefore make the same number of calls in any case.
class SyncBatchNormGroup final : public BatchNormPeers {
 public:
  /// `max_channels`: of all BatchNorm modules of the model.
  SyncBatchNormGroup(std::shared_ptr<RankGroup> group, int64_t max_channels);

  /// Throws c10::Error if a rank has failed; failed_elsewhere() is true from then on.
  torch::Tensor gather(const torch::Tensor& own) override;

  /// Begins a window. Must be called before its first micro-batch.
  void open();
  /// Ends a window. Throws as gather() does.
  void close();
  /// Reports that the window of this rank has failed. Has no effect if no window is open,
  /// or if the failure of another rank has closed it.
  void fail();
  /// Whether another rank has failed in the last window.
  bool failed_elsewhere() const { return failed_elsewhere_; }

  /// Number of exchanges so far.
  int64_t calls() const { return calls_; }

 private:
  torch::Tensor exchange(bool failed);

  std::shared_ptr<RankGroup> group_;
  torch::Tensor row_;    // whether this rank has failed, then values
  torch::Tensor table_;  // the rows of all ranks
  bool open_ = false;
  bool failed_elsewhere_ = false;
  int64_t calls_ = 0;
};

}  // namespace reprise
