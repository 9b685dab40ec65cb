#pragma once

#include <reprise/distributed/group.h>
#include <reprise/ops/shared_norm.h>

#include <cstdint>
#include <memory>

namespace reprise {

/// The ranks of a group as peers of BatchNorm, window by window.
///
///     NormSync norms(group, most_channels);
///     norms.open();
///     {
///       const SharedNormScope scope(norms);   // each micro-batch
///       …
///     }
///     norms.close();
///
/// Through the host, on the connections for decisions. Every message has the same
/// size, so that a rank whose window has failed can tell the others, whichever norm
/// they are at: fail() stands for its next message, and theirs throws. So all ranks
/// make as many calls, whatever happens.
class NormSync final : public NormPeers {
 public:
  /// `most_channels` of the model's norms.
  NormSync(std::shared_ptr<RankGroup> group, int64_t most_channels);

  /// Throws c10::Error where a rank has failed; failed_elsewhere() from then on.
  torch::Tensor gather(const torch::Tensor& own) override;

  void open();
  /// At the window's end; the same error as gather().
  void close();
  /// This rank's window has failed. Nothing where no window is open, or where another
  /// rank's failure has closed it.
  void fail();
  bool failed_elsewhere() const { return failed_elsewhere_; }

  int64_t calls() const { return calls_; }

 private:
  torch::Tensor exchange(bool failed);

  std::shared_ptr<RankGroup> group_;
  torch::Tensor row_;    // whether it has failed, and values
  torch::Tensor table_;  // of all ranks
  bool open_ = false;
  bool failed_elsewhere_ = false;
  int64_t calls_ = 0;
};

}  // namespace reprise
