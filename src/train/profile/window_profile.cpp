#include "train/profile/window_profile.h"

#include <utility>

namespace reprise {

WindowProfile::WindowProfile(torch::Device device, const MemoryLedger& ledger,
                             const KeptMeter& kept)
    : meter_(device), ledger_(ledger), kept_(kept) {}

void WindowProfile::before(const Op&) {
  before_ = ledger_.measure();
  meter_.restart();
}

void WindowProfile::after(const Op& op) {
  const bool back = op.kind == OpKind::kBackward || op.kind == OpKind::kFetch;
  look(back ? "backward" : "forward", op.stage);
}

void WindowProfile::begin(std::string phase) {
  current_phase_ = std::move(phase);
  before({});
}

void WindowProfile::end() {
  look(current_phase_, -1);
}

void WindowProfile::forward_done() {
  if (kept_by_stage_.empty()) kept_by_stage_ = kept_.live_by_stage();
  kept_bytes_ = std::max(kept_bytes_, kept_.live_bytes());
}

void WindowProfile::look(const std::string& phase, int stage) {
  const int64_t peak = meter_.peak_bytes();
  if (peak <= peak_bytes_) return;
  peak_bytes_ = peak;
  phase_ = phase;
  stage_ = stage;
  // Memory by category is that at the start of the operation; everything that
  // the operation allocates counts as workspace.
  memory_ = before_;
  memory_.bytes[static_cast<size_t>(Category::kWorkspace)] +=
      peak - before_.total_bytes;
  memory_.total_bytes = peak;
}

}  // namespace reprise
