#pragma once

#include <reprise/memory/categories.h>
#include <reprise/memory/meter.h>
#include <reprise/recompute/execution.h>

#include <cstdint>
#include <string>
#include <vector>

namespace reprise {

/// Finds the peak of a window and the memory by category at that point. It
/// observes each operation of an execution separately, which makes the window
/// slower than others. Tested by tests/train/profile/profile_test.cpp and
/// tests/train/loop/trainer_test.cpp.
class WindowProfile : public ExecutionObserver {
 public:
  /// Activations are counted by `kept`, all other categories by `ledger`. Both
  /// must outlive this object.
  WindowProfile(torch::Device device, const MemoryLedger& ledger,
                const KeptMeter& kept);

  void before(const Op& op) override;
  void after(const Op& op) override;

  /// Enclose work that is not an operation of the schedule, such as an update.
  void begin(std::string phase);
  void end();

  /// Called after a forward; notes what is saved for the backward.
  void forward_done();

  int64_t peak_bytes() const { return peak_bytes_; }
  int64_t kept_bytes() const { return kept_bytes_; }
  /// Saved bytes of each stage after the first forward.
  const std::vector<int64_t>& kept_by_stage() const { return kept_by_stage_; }
  const std::string& phase() const { return phase_; }
  int stage() const { return stage_; }  ///< -1: none
  /// Memory by category at the peak; what no other category claims counts as
  /// workspace.
  const MemoryBreakdown& memory() const { return memory_; }

 private:
  void look(const std::string& phase, int stage);

  MemoryMeter meter_;
  const MemoryLedger& ledger_;
  const KeptMeter& kept_;
  std::string current_phase_;
  int64_t peak_bytes_ = 0;
  int64_t kept_bytes_ = 0;
  std::vector<int64_t> kept_by_stage_;
  std::string phase_;
  int stage_ = -1;
  MemoryBreakdown before_;  // at the start of the current operation
  MemoryBreakdown memory_;
};

}  // namespace reprise
