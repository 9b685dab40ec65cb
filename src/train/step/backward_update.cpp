#include "train/step/backward_update.h"

#include "compat/denormals.h"
#include "ops/adam_update.h"
#include "plan/update_cuts.h"
#include "train/step/oom_retry.h"

#include <reprise/memory/meter.h>
#include <reprise/ops/weight_copies.h>

#include <set>
#include <utility>

namespace reprise::detail {
namespace {

using torch::Tensor;

PartialOptimizer& partial_of(Optimizer& optimizer) {
  auto* partial = dynamic_cast<PartialOptimizer*>(&optimizer);
  TORCH_CHECK(partial != nullptr,
              "[--update] backward needs an optimizer that can update single "
              "parameters, got one of the caller that cannot; use --update "
              "after, or an optimizer of make_optimizer()");
  return *partial;
}

}  // namespace

std::vector<std::vector<Tensor>> trained_by_first_stage(const Model& model) {
  const Chain& chain = model.chain;
  std::vector<std::vector<Tensor>> by_stage(static_cast<size_t>(chain.size()));
  std::set<const void*> seen;
  for (int i = 0; i < chain.size(); ++i) {
    for (const auto& module : chain[i].modules()) {
      for (const Tensor& parameter : module->parameters()) {
        if (parameter.requires_grad() &&
            seen.insert(parameter.unsafeGetTensorImpl()).second) {
          by_stage[static_cast<size_t>(i)].push_back(parameter);
        }
      }
    }
  }
  return by_stage;
}

std::vector<int64_t> final_gradient_bytes(const TrainSetup& setup) {
  std::vector<int64_t> bytes;
  for (const auto& parameters : trained_by_first_stage(setup.model)) {
    int64_t& sum = bytes.emplace_back(0);
    for (const Tensor& parameter : parameters) {
      sum += gradient_bytes(setup, parameter);
    }
  }
  return bytes;
}

BackwardUpdate::BackwardUpdate(const TrainSetup& setup, Optimizer& optimizer)
    : device_(setup.device),
      partial_(partial_of(optimizer)),
      cuts_(update_cuts(final_gradient_bytes(setup))),
      by_stage_(trained_by_first_stage(setup.model)) {}

bool BackwardUpdate::supports(const Optimizer& optimizer) {
  return dynamic_cast<const PartialOptimizer*>(&optimizer) != nullptr;
}

void BackwardUpdate::attach(ExecutionOptions& options) {
  options.cuts = cuts_;
  options.final_from = [this](int stage) {
    if (active_) final_from(stage);
  };
}

void BackwardUpdate::begin(double lr, bool count_denormals) {
  TORCH_INTERNAL_ASSERT(!changed_);
  if (lane_) lane_->join(0);  // of a failed attempt
  partial_.begin_update(lr);
  updated_.clear();
  stages_left_ = by_stage_.size();
  values_ = denormals_ = 0;
  count_denormals_ = count_denormals && device_.is_cpu();
  active_ = true;
}

void BackwardUpdate::final_from(int stage) {
  std::vector<Tensor> parameters;
  const auto first = static_cast<size_t>(stage);
  while (stages_left_ > first) {
    for (const Tensor& parameter : by_stage_[--stages_left_]) {
      if (parameter.grad().defined()) parameters.push_back(parameter);
    }
  }
  if (parameters.empty()) return;
  if (count_denormals_) {
    std::vector<Tensor> gradients;
    double values = 0;
    for (const Tensor& parameter : parameters) {
      gradients.push_back(parameter.grad());
      values += static_cast<double>(parameter.numel());
    }
    denormals_ += values * compat::denormal_share(gradients);
    values_ += values;
  }
  WeightCopies::mark_outdated(parameters);
  // A part allocates everything before its first value changes. If that fails in the first one,
  // the micro-batch is repeated. Later ones are repeated here.
  const bool first_part = !std::exchange(changed_, true);
  const auto part = [&] { update_some(parameters); };
  if (first_part || captured_) {
    try {
      part();
    } catch (const c10::Error& error) {
      if (first_part && is_out_of_memory(error)) changed_ = false;
      throw;
    }
  } else {
    repeat_part(device_, part, [this] {
      if (lane_) lane_->join(0);
    });
  }
  for (Tensor& parameter : parameters) parameter.mutable_grad().reset();
  updated_.insert(updated_.end(), parameters.begin(), parameters.end());
}

void BackwardUpdate::update_some(const std::vector<Tensor>& parameters) {
  if (!lane_) return partial_.update_some(parameters, captured_);
  std::vector<Tensor> used = parameters;
  for (const Tensor& parameter : parameters) used.push_back(parameter.grad());
  lane_->join(0);  // its gradients are freed
  lane_->run(std::move(used),
             [&] { partial_.update_some(parameters, captured_); });
}

void BackwardUpdate::set_beside(bool beside) {
  if (beside == (lane_ != nullptr)) return;
  if (lane_) lane_->join(0);
  lane_ = beside ? compat::make_work_lane(device_) : nullptr;
}

void BackwardUpdate::check_recorded() const {
  bool same = recorded_.empty() || recorded_.size() == updated_.size();
  for (size_t i = 0; same && i < recorded_.size(); ++i) {
    same = recorded_[i].is_same(updated_[i]);
  }
  TORCH_CHECK(same,
              "the parameters that get a gradient depend on the shape of the "
              "micro-batch");
}

void BackwardUpdate::forget_captured() {
  updated_.clear();
  stages_left_ = by_stage_.size();
  changed_ = false;
}

void BackwardUpdate::note_replay() {
  if (updated_.empty()) {
    // Nothing was called: the device did what was recorded before.
    mark_adam_updated(recorded_);
    updated_ = recorded_;
  } else {
    recorded_ = updated_;
  }
  changed_ = true;
}

void BackwardUpdate::finish() {
  if (lane_) lane_->join(0);
  partial_.end_update(std::exchange(updated_, {}));
  active_ = changed_ = false;
}

double BackwardUpdate::denormal_share() const {
  return values_ > 0 ? denormals_ / values_ : 0;
}

}  // namespace reprise::detail
