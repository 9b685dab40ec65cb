// TrainingCosts: costs of updates, after and in the backward.
// Tested by tests/train/budget/update_planning_test.cpp.
#include "train/budget/model_state_guard.h"
#include "train/budget/training_costs.h"
#include "train/config/update_refusal.h"
#include "train/step/backward_update.h"

#include <reprise/accumulate/accumulator.h>
#include <reprise/memory/meter.h>
#include <reprise/train/optimizer.h>

#include <algorithm>
#include <vector>

namespace reprise::detail {

UpdateMode TrainingCosts::update(const CostProfile& profile) const {
  TrainOptions options = setup_.options;
  options.precision = profile.precision;
  const bool can =
      !profile.final_gradient_bytes.empty() && update_refusal(options).empty();
  return can ? options.update : UpdateMode::kAfter;
}

void TrainingCosts::measure_update(CostProfile& profile) {
  const ModelStateGuard guard(setup_.model, setup_.device,
                              /*parameters=*/true);
  for (const auto& [name, parameter] : setup_.parameters) {
    torch::Tensor p = parameter;
    if (p.requires_grad()) p.mutable_grad() = torch::zeros_like(p);
  }
  const auto optimizer = optimizer_of(setup_);
  const auto parameters = setup_.parameter_list;
  auto made = copies(profile.precision);
  // Include what a window does outside of the optimizer, and its device memory.
  const auto update = [&] {
    if (made) made->expire();
    torch::Tensor norm;
    if (setup_.options.clip > 0) {
      norm = gradient_norm(parameters);
      clip_gradients(parameters, norm, setup_.options.clip);
    }
    const torch::Tensor loss = torch::zeros({}, setup_.device);
    optimizer->step(0);
    if (made) made->refresh();
  };
  MemoryMeter meter(setup_.device);
  update();
  for (const auto& tensor : optimizer->held()) {
    if (tensor.device() != setup_.device) continue;
    profile.fixed.optimizer +=
        allocated_bytes(static_cast<int64_t>(tensor.nbytes()), setup_.device);
  }
  // The first step allocates the state and may need more temporaries than later
  // ones.
  const int64_t first_bytes =
      meter.peak_increase_bytes() - profile.fixed.optimizer;
  if (setup_.options.shard != Sharding::kNone) {
    profile.fixed.optimizer /= setup_.options.ranks;
  }
  meter.restart();
  profile.update_ms =
      time_of(setup_.device, options_.memory_only ? 1 : 3, update);
  profile.update_bytes = std::max(first_bytes, meter.peak_increase_bytes());
  made.reset();
  for (auto& parameter : setup_.parameter_list) {
    parameter.mutable_grad().reset();
  }
  if (BackwardUpdate::supports(*optimizer)) {
    measure_stage_updates(profile, *optimizer);
  }
}

void TrainingCosts::measure_stage_updates(CostProfile& profile,
                                          Optimizer& optimizer) {
  profile.final_gradient_bytes =
      final_gradient_bytes(setup_.model, setup_.device);
  profile.stage_update_bytes.assign(profile.stages.size(), 0);
  BackwardUpdate update(setup_, optimizer);
  ExecutionOptions execution;
  update.attach(execution);
  std::vector<int> firsts = update.cuts();
  firsts.push_back(0);
  size_t left = update.by_stage().size();
  update.begin(/*lr=*/0, /*count_denormals=*/false);
  for (const int first : firsts) {
    while (left > static_cast<size_t>(first)) {
      for (torch::Tensor parameter : update.by_stage()[--left]) {
        parameter.mutable_grad() = torch::zeros_like(parameter);
      }
    }
    const MemoryMeter meter(setup_.device);
    execution.final_from(first);
    profile.stage_update_bytes[static_cast<size_t>(first)] =
        meter.peak_increase_bytes();
  }
  update.finish();
  profile.captures_update = update.capture_refusal().empty();
}

}  // namespace reprise::detail
