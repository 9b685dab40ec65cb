// Tested by tests/train/budget/planning_test.cpp.
#include "train/loop/run_clock.h"

#include <reprise/train/planning.h>
#include <reprise/train/trainer.h>

#include <algorithm>
#include <vector>

namespace reprise {

PlanMeasurement measure_plan(const TrainConfig& config, const Plan& plan,
                             int64_t memory, int windows) {
  TORCH_CHECK(windows > 0, "[measure_plan] expected 1 window or more, got ",
              windows);
  TrainConfig fixed = config;
  fixed.memory_limit = memory;
  fixed.evaluate = false;
  if (!plan.graph) fixed.graph = GraphMode::kOff;
  fixed.batch = plan.micro_batch;
  fixed.accumulate = plan.accumulate;
  fixed.global_batch = plan.global_batch;
  fixed.precision = plan.precision;
  fixed.recompute = plan.schedule.to_text();
  fixed.update = plan.update;
  fixed.state = plan.state;
  fixed.host_share = plan.host_share;
  if (plan.weight_copies) fixed.weight_copies = *plan.weight_copies;
  if (plan.settings) {
    fixed.layout = plan.settings->layout;
    fixed.autotune = plan.settings->autotune;
  }
  fixed.epochs = 0;
  fixed.steps = detail::kWarmUpWindows + windows;
  fixed.resolve();
  Trainer trainer(make_inputs(fixed), fixed);
  const TrainResult result = trainer.run();
  std::vector<double> ms = trainer.window_ms();
  ms.erase(ms.begin(),
           ms.begin() + std::min<std::ptrdiff_t>(
                            static_cast<std::ptrdiff_t>(ms.size()) - 1,
                            detail::kWarmUpWindows));
  std::sort(ms.begin(), ms.end());
  const auto at = [&](double share) {
    return ms[static_cast<size_t>(share * static_cast<double>(ms.size() - 1))];
  };
  return {result.summary.peak_bytes, at(0.5), (at(0.75) - at(0.25)) / 2};
}

}  // namespace reprise
