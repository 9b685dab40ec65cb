#include "train/profile/step_time.h"

#include "train/budget/schedule_timer.h"
#include "train/loop/run_clock.h"

#include <reprise/train/trainer.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

namespace reprise::detail {
namespace {

constexpr double kTimedMs = 1000;
constexpr double kMinWindows = 3;
constexpr double kMaxWindows = 50;
/// Windows after the warm-up in which the shapes of a whole window are captured:
/// two, because the first may be the short one at the end of an epoch.
constexpr int64_t kCaptureWindows = 2;

}  // namespace

StepTime time_step(TrainInputs inputs, TrainConfig options,
                   double expected_ms) {
  const auto timed = static_cast<int64_t>(
      std::clamp(std::ceil(kTimedMs / std::max(expected_ms, 1e-3)), kMinWindows,
                 kMaxWindows));
  options.steps = kWarmUpWindows + kCaptureWindows + timed;
  options.epochs = 0;
  options.seconds = 0;
  options.rate = {.base = 0};
  options.evaluate = false;
  inputs.data.test = nullptr;
  const int64_t samples = inputs.data.train->epoch_size();
  const int64_t per_epoch =
      (samples + options.global_batch - 1) / options.global_batch;
  const bool last_is_short =
      per_epoch > 1 && samples % options.global_batch != 0;

  Trainer trainer(std::move(inputs), options);
  const TrainSummary summary = trainer.run().summary;
  const std::vector<double> window_ms = trainer.window_ms();
  // A window whose gradients overflow prolongs the warm-up.
  const int64_t first = kWarmUpWindows + summary.skipped +
                        (summary.graph_captures > 0 ? kCaptureWindows : 0);
  std::vector<double> steady_ms;
  for (auto i = static_cast<int64_t>(window_ms.size());
       i-- > 0 && (i >= first || steady_ms.empty());) {
    if (last_is_short && i % per_epoch == per_epoch - 1) continue;
    steady_ms.push_back(window_ms[static_cast<size_t>(i)]);
  }
  return {median_of(std::move(steady_ms)), summary.graph};
}

}  // namespace reprise::detail
