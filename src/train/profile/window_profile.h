#pragma once

#include <reprise/memory/categories.h>
#include <reprise/memory/meter.h>
#include <reprise/recompute/execution.h>

#include <cstdint>
#include <string>

namespace reprise {

/// Finds the moment of a window when most memory is live, and what it is used
/// for. Looks at each operation of an execution by itself, so its window is
/// slower than others.
class WindowProfile : public ExecutionObserver {
 public:
  /// `ledger` has all categories claimed but activations, which are `kept`'s.
  WindowProfile(torch::Device device, const MemoryLedger& ledger,
                const KeptMeter& kept);

  void before(const Op& op) override;
  void after(const Op& op) override;

  /// Around what is no operation of the schedule: an update.
  void begin(std::string phase);
  void end();

  /// After a forward: what is held for the backward.
  void forward_done();

  int64_t peak_bytes() const { return peak_bytes_; }
  int64_t kept_bytes() const { return kept_bytes_; }
  const std::string& phase() const { return phase_; }
  int stage() const { return stage_; }  ///< -1: none
  /// At the peak; workspace is what no other category claims.
  const MemoryBreakdown& memory() const { return memory_; }

 private:
  void look(const std::string& phase, int stage);

  MemoryMeter meter_;
  const MemoryLedger& ledger_;
  const KeptMeter& kept_;
  std::string current_phase_;
  int64_t peak_bytes_ = 0;
  int64_t kept_bytes_ = 0;
  std::string phase_;
  int stage_ = -1;
  MemoryBreakdown before_;  // when the operation at hand began
  MemoryBreakdown memory_;
};

}  // namespace reprise
