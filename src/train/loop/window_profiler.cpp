#include "train/loop/window_profiler.h"

#include "train/profile/claim_memory.h"

namespace reprise::detail {

WindowProfiler::WindowProfiler(const TrainSetup& setup,
                               const BatchSource& source, StepRunner& runner,
                               const Optimizer& optimizer)
    : setup_(setup),
      runner_(runner),
      kept_(setup.parameter_list),
      ledger_(setup.device) {
  claim_memory(ledger_, setup, source, runner, optimizer, kept_);
}

void WindowProfiler::begin_window(int64_t windows, int64_t left,
                                  bool separate_graphs) {
  active_ = !profile_ && (windows >= 1 || left == 1);
  if (!active_) return;
  profile_.emplace(setup_.device, ledger_, kept_);
  runner_.observe(*profile_, &kept_, separate_graphs);
}

void WindowProfiler::end_window(bool updated) {
  if (!active_) return;
  runner_.unobserve();
  active_ = false;
  if (!updated) profile_.reset();
}

void WindowProfiler::drop_window() {
  end_window(/*updated=*/false);
}

void WindowProfiler::reset() {
  runner_.unobserve();
  active_ = false;
  profile_.reset();
}

void WindowProfiler::describe(TrainSummary& summary) const {
  if (!profile_) return;
  summary.kept_bytes = profile_->kept_bytes();
  summary.peak_phase = profile_->phase();
  if (profile_->stage() >= 0) {
    summary.peak_stage = setup_.model.chain[profile_->stage()].name();
  }
  summary.window_peak_bytes = profile_->peak_bytes();
  summary.memory = profile_->memory();
}

}  // namespace reprise::detail
