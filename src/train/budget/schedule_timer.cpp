#include "train/budget/schedule_timer.h"

#include "train/budget/model_state_guard.h"
#include "train/step/ranks.h"
#include "train/step/step_runner.h"
#include "train/step/window_exchange.h"

#include <reprise/memory/meter.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace reprise::detail {
namespace {

constexpr double kRowMs = 30;  // least duration of a row
constexpr double kOneMs = 60;  // micro-batches that are a row on CUDA
// Micro-batches to time in two rows only, and in one row only. A CPU has other work as well.
constexpr double kLongMs = 500, kLongCudaMs = 100;
constexpr double kVeryLongMs = 1500, kVeryLongCudaMs = 400;
constexpr double kWarmUpMs = 150;  // enough time for a warm-up on CUDA

/// Returns the setup with another precision. It shares the model.
TrainSetup with_precision(const TrainSetup& setup, Precision precision) {
  TrainSetup changed = setup;
  changed.options.precision = precision;
  changed.autocast = autocast_of(precision, setup.device);
  return changed;
}

/// Runs `step` in rows and returns the median time per step. `graph`: as a CUDA graph, which
/// the second step captures.
template <class Step>
double time_rows(torch::Device device, const ScheduleTimer::Timing& timing,
                 bool graph, const Step& step) {
  const bool cuda = device.is_cuda();
  // The caching allocator needs a few steps until it reuses its blocks; for long ones that
  // takes less time than a step.
  const int warm_up = cuda ? (timing.warm_up ? 3 : 1) : timing.warm_up ? 1 : 0;
  const int least = graph ? 2 : 0;
  double warm_ms = 0;
  for (int i = 0; i < least || (i < warm_up && warm_ms < kWarmUpMs); ++i) {
    warm_ms += time_of(device, 1, step);
  }
  // A row is long enough for the host to run ahead of the device as in
  // training. A long micro-batch is a row of its own, and one or two are enough.
  const double about_ms = std::max(time_of(device, 1, step), 0.1);
  const int enough = static_cast<int>(std::ceil(kRowMs / about_ms));
  const bool is_long = about_ms >= kOneMs;
  const int in_a_row = std::max(enough, !cuda || is_long ? 1
                                        : enough > 1     ? 5
                                                         : 2);
  const int most_rows = about_ms >= (cuda ? kVeryLongCudaMs : kVeryLongMs) ? 1
                        : about_ms >= (cuda ? kLongCudaMs : kLongMs)       ? 2
                                                                           : 3;
  const auto rows = static_cast<size_t>(std::min(timing.rows, most_rows));
  std::vector<double> row_ms;
  if (in_a_row == 1) row_ms.push_back(about_ms);
  while (row_ms.size() < rows) {
    const auto row = [&] {
      for (int i = 0; i < in_a_row; ++i) step();
    };
    row_ms.push_back(time_of(device, 1, row) / in_a_row);
  }
  return median_of(std::move(row_ms));
}

}  // namespace

double median_of(std::vector<double> values) {
  const auto middle =
      values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

ScheduleTimer::Result ScheduleTimer::time(const Trial& trial, Batch any,
                                          const Timing& timing) const {
  TrainSetup setup = with_precision(setup_, trial.precision);
  const auto ranks = make_ranks(nullptr);
  const auto exchange = make_window_exchange(*ranks, setup);
  const bool updates = trial.update == UpdateMode::kBackward;
  const MemoryMeter meter(setup.device);
  StepRunner runner(setup, *exchange, trial.schedule,
                    {.graph = trial.graph ? GraphMode::kAuto : GraphMode::kOff,
                     .optimizer = trial.optimizer,
                     .update = trial.update});
  runner.refresh_weight_copies();
  Batches batches(setup, trial.micro_batch, std::move(any));
  std::vector<torch::Tensor> parameters = setup.parameter_list;
  std::erase_if(parameters, [](const auto& p) { return !p.requires_grad(); });
  HostParameters* const host =
      runner.moves_parameters() ? setup.host_parameters.get() : nullptr;
  HalfGradients* const half = runner.half_gradients();
  if (trial.accumulate && !updates && half == nullptr) {
    for (auto& p : parameters) {
      // Others are in host memory after the first micro-batch.
      if (host == nullptr || !host->moves(p)) {
        p.mutable_grad() = zero_gradient(setup, p);
      }
    }
  }
  Batch batch;
  const auto next_batch = [&] {
    batch = batches.next();
    move_to(batch, setup.device);
    prepare_batch(setup, batch);
  };
  const bool both = updates && trial.accumulate;
  const double ms = time_rows(setup.device, timing, trial.graph, [&] {
    if (!trial.accumulate) {
      for (auto& p : parameters) p.mutable_grad().reset();
      if (host != nullptr) host->forget_gradients();
      if (half != nullptr) half->forget();
    }
    next_batch();
    if (updates) runner.refresh_weight_copies();
    if (!updates || both) runner.run(batch, {.weight = 1e-6});
    if (!updates) return;
    if (both) next_batch();
    runner.run(batch, {.weight = 1e-6, .update_lr = 0.0});
    runner.finish_update();
  });
  return {both ? ms / 2 : ms, meter.peak_bytes()};
}

}  // namespace reprise::detail
