// TrainingCosts: costs of updates, after and in the backward.
// Tested by tests/train/budget/update_planning_test.cpp.
#include "compat/cuda.h"
#include "train/budget/model_state_guard.h"
#include "train/budget/training_costs.h"
#include "train/config/update_refusal.h"
#include "train/step/backward_update.h"
#include "train/step/oom_retry.h"

#include <reprise/accumulate/accumulator.h>
#include <reprise/memory/meter.h>
#include <reprise/train/optimizer.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

namespace reprise::detail {
namespace {

constexpr double kLongUpdateMs = 100;  // to be timed once

/// Whether an update with gradients of zero and a learning rate of 0 may change a parameter.
/// With our optimizers only if they divide 0 by 0.
bool changes_parameters(const TrainSetup& setup) {
  return setup.own_optimizer != nullptr || setup.options.optimizer.eps == 0;
}

}  // namespace

UpdateMode TrainingCosts::update(const CostProfile& profile) const {
  TrainOptions options = setup_.options;
  options.precision = profile.precision;
  const bool can =
      !profile.final_gradient_bytes.empty() && update_refusal(options).empty();
  if (profile.updates_in_last()) return UpdateMode::kBackward;
  return can ? options.update : UpdateMode::kAfter;
}

int64_t TrainingCosts::bytes_held_by(const Optimizer& optimizer) const {
  int64_t bytes = 0;
  for (const auto& tensor : optimizer.held()) {
    if (tensor.device() != setup_.device) continue;
    bytes +=
        allocated_bytes(static_cast<int64_t>(tensor.nbytes()), setup_.device);
  }
  return bytes;
}

void TrainingCosts::reuse_update(CostProfile& profile) const {
  const TrainingCosts* source = options_.same_update;
  const bool same = source != nullptr && source->state() == state() &&
                    source->profiles_.count(profile.precision) > 0;
  TORCH_CHECK_WITH(OutOfMemoryError, same,
                   "there is no room to measure an update beside the "
                   "training's own state");
  const CostProfile& other = source->profiles_.at(profile.precision);
  profile.update_ms = other.update_ms;
  profile.backward_update_ms = other.backward_update_ms;
  profile.update_bytes = other.update_bytes;
  profile.fixed.optimizer = other.fixed.optimizer;
  profile.host_state_bytes = other.host_state_bytes;
  profile.final_gradient_bytes = other.final_gradient_bytes;
  profile.stage_update_bytes = other.stage_update_bytes;
  profile.captures_update = other.captures_update;
}

void TrainingCosts::measure_update(CostProfile& profile) {
  if (options_.training) return reuse_update(profile);
  const ModelStateGuard guard(setup_,
                              !setup_.sharded && changes_parameters(setup_));
  const auto optimizer = trial_optimizer(profile.precision);
  std::optional<std::string> failure;
  if (!moves_parameters()) {
    failure =
        out_of_memory_in([&] { measure_whole_update(profile, *optimizer); });
  }
  for (torch::Tensor parameter : values(updated_parameters(setup_))) {
    parameter.mutable_grad().reset();
  }
  if (const auto* kept = dynamic_cast<PartialOptimizer*>(optimizer.get())) {
    profile.host_state_bytes = kept->host_state_bytes();
  }
  for (const auto* moved :
       {&profile.moved_bytes, &profile.moved_gradient_bytes}) {
    if (profile.gathers_parameters) break;
    for (const int64_t bytes : *moved) profile.host_state_bytes += bytes;
  }
  const bool partial = !setup_.sharded && BackwardUpdate::supports(*optimizer);
  if (failure) {
    // All gradients do not fit beside the optimizer's state. Those of a stage may.
    TORCH_CHECK_WITH(OutOfMemoryError, partial, *failure);
    if (setup_.device.is_cuda()) compat::empty_cuda_cache();
  }
  if (partial) measure_stage_updates(profile, *optimizer);
}

void TrainingCosts::measure_whole_update(CostProfile& profile,
                                         Optimizer& optimizer) {
  const auto parameters = values(updated_parameters(setup_));
  for (torch::Tensor p : parameters) {
    if (setup_.sharded || p.requires_grad()) {
      p.mutable_grad() = zero_gradient(setup_, p);
    }
  }
  const auto made = copies(profile.precision);
  // As a training does unless its listener reads parameters.
  const bool in_place =
      setup_.options.ranks == 1 && BackwardUpdate::supports(optimizer);
  // Include what a window does outside of the optimizer, and its device memory.
  const auto update = [&] {
    if (made && in_place) made->expire_for_update();
    if (made && !in_place) made->expire();
    torch::Tensor norm;
    if (setup_.options.clip > 0) {
      norm = gradient_norm(parameters);
      clip_gradients(parameters, norm, setup_.options.clip);
    }
    const torch::Tensor loss = torch::zeros({}, setup_.device);
    optimizer.step(0);
    if (made) made->refresh();
  };
  MemoryMeter meter(setup_.device);
  update();
  const int64_t state = bytes_held_by(optimizer);
  // The first step allocates the state and may need more temporaries than later
  // ones.
  const int64_t first_bytes = meter.peak_increase_bytes() - state;
  meter.restart();
  profile.update_ms = time_of(setup_.device, 1, update);
  if (!options_.memory_only && profile.update_ms < kLongUpdateMs) {
    profile.update_ms = time_of(setup_.device, 3, update);
  }
  profile.update_bytes = std::max(first_bytes, meter.peak_increase_bytes());
  profile.fixed.optimizer = state;
  if (setup_.options.shard != Sharding::kNone && !setup_.sharded) {
    // All of the parameters were updated here, and a rank has its part.
    profile.fixed.optimizer /= setup_.options.sharing_ranks();
    profile.update_bytes /= setup_.options.sharing_ranks();
    profile.update_ms /= static_cast<double>(setup_.options.sharing_ranks());
  }
}

void TrainingCosts::measure_stage_updates(CostProfile& profile,
                                          Optimizer& optimizer) {
  profile.final_gradient_bytes = final_gradient_bytes(setup_);
  profile.stage_update_bytes.assign(profile.stages.size(), 0);
  // There may be no room for copies if the update as a whole did not fit.
  const auto made = profile.update_ms > 0 ? copies(profile.precision) : nullptr;
  BackwardUpdate update(setup_, optimizer);
  ExecutionOptions execution;
  update.attach(execution);
  HostParameters* const host =
      moves_parameters() ? setup_.host_parameters.get() : nullptr;
  std::vector<int> firsts = host != nullptr ? host->cuts() : update.cuts();
  firsts.push_back(0);
  size_t left = update.by_stage().size();
  double sum_ms = 0;
  int64_t most_bytes = 0;
  update.begin(/*lr=*/0, /*count_denormals=*/false);
  for (const int first : firsts) {
    if (host != nullptr) {
      host->bring(first);
      const auto i = static_cast<size_t>(first);
      profile.final_gradient_bytes[i] -= std::min(
          profile.final_gradient_bytes[i], profile.moved_gradient_bytes[i]);
    }
    while (left > static_cast<size_t>(first)) {
      for (torch::Tensor parameter : update.by_stage()[--left]) {
        parameter.mutable_grad() = zero_gradient(setup_, parameter);
      }
    }
    const MemoryMeter meter(setup_.device);
    sum_ms += time_of(setup_.device, 1, [&] { execution.final_from(first); });
    const int64_t bytes = meter.peak_increase_bytes();
    profile.stage_update_bytes[static_cast<size_t>(first)] = bytes;
    most_bytes = std::max(most_bytes, bytes);
  }
  update.finish();
  profile.captures_update = update.capture_refusal().empty();
  profile.backward_update_ms = sum_ms;
  if (profile.update_ms > 0) return;
  // The update as a whole did not fit.
  profile.update_ms = sum_ms;
  profile.update_bytes = most_bytes;
  profile.fixed.optimizer = bytes_held_by(optimizer);
}

}  // namespace reprise::detail
