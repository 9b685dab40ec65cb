#include "plan/plan_format.h"
#include "train/budget/budget_planner.h"
#include "train/budget/cost_choice.h"
#include "train/budget/device_settings.h"
#include "train/budget/training_costs.h"
#include "train/config/update_refusal.h"

#include <reprise/base/bytes.h>
#include <reprise/train/planning.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

namespace reprise {
namespace {

using detail::CostChoice;
using detail::make_setup;
using detail::TrainingCosts;
using detail::TrainSetup;

TrainingCosts::Options cost_options(const PlanningOptions& options) {
  TrainingCosts::Options result;
  result.fresh = options.fresh;
  result.memory = options.memory;
  result.memory_only = options.quick;
  result.progress = options.progress;
  return result;
}

/// Returns the options, or the configuration, without planning and evaluation.
template <class Options>
Options plain(Options config) {
  config.memory_limit = 0;
  config.evaluate = false;
  if (config.batch == 0) config.batch = 1;
  if (config.accumulate == 0) config.accumulate = 1;
  config.global_batch = config.batch * config.accumulate;
  if (config.recompute.empty() || config.plans_schedule() ||
      config.plans_if_long()) {
    config.recompute = "none";
  }
  return config;
}

/// The setup with settings for its device, measured unless only memory matters.
TrainSetup settled(TrainSetup setup, const PlanningOptions& options) {
  const auto ranks = detail::make_ranks(nullptr);
  detail::settle_device_settings(
      setup, *ranks, {!options.quick, options.memory, options.progress});
  return setup;
}

PlanningOptions within(PlanningOptions options, const PlanRequest& request) {
  options.memory = request.memory;
  return options;
}

class MeasuringPlanner final : public BudgetPlanner {
 public:
  MeasuringPlanner(TrainSetup setup, PlanRequest request,
                   const PlanningOptions& options)
      : costs_(std::move(setup), cost_options(within(options, request))),
        request_(std::move(request)) {}

  Plan decide() override {
    const PlanResult result = costs_.plan(request_);
    // To the caller, an infeasible budget is a lack of memory.
    TORCH_CHECK_WITH(OutOfMemoryError, result.feasible,
                     "[--memory] nothing fits into ",
                     detail::format_exact_bytes(request_.memory),
                     "; the smallest plan needs ",
                     detail::format_sufficient_bytes(result.smallest_bytes),
                     ": ", describe(result.plan));
    return result.plan;
  }

  std::optional<Plan> tighten(const Plan& present,
                              int64_t over_bytes) override {
    // Lower the budget by the error of the prediction, or by a tenth if the
    // error is unknown.
    const int64_t less = over_bytes > 0
                             ? over_bytes
                             : std::max<int64_t>(1, present.peak_bytes / 10);
    PlanRequest request = request_;
    request.micro_batch = present.micro_batch;
    request.memory = std::max<int64_t>(1, present.peak_bytes - less);
    const PlanResult result = costs_.plan(request, &present);
    if (result.feasible) return result.plan;
    const bool lower = result.plan.peak_bytes < present.peak_bytes;
    // This saves less than requested, but results stay bit-identical.
    if (lower && over_bytes == 0) return result.plan;
    if (auto smaller = smaller_batch(present, request.memory)) return smaller;
    if (lower) return result.plan;
    return std::nullopt;
  }

 private:
  std::optional<Plan> smaller_batch(const Plan& present, int64_t budget) {
    if (request_.micro_batch > 0) return std::nullopt;  // given by the user
    PlanRequest request = request_;
    request.memory = budget;
    const PlanResult result = costs_.plan(request, &present);
    const auto smaller = [&](const Plan& plan) {
      return plan.micro_batch < present.micro_batch &&
             plan.peak_bytes < present.peak_bytes;
    };
    if (smaller(result.plan)) return result.plan;
    for (const Plan& plan : result.alternatives) {
      if (smaller(plan)) return plan;
    }
    return std::nullopt;
  }

  CostChoice costs_;
  PlanRequest request_;
};

/// Size to maximize, as multiples of `step`.
struct Axis {
  int64_t ModelOptions::*option = nullptr;  // null: the batch
  int64_t step = 1;
  int64_t first = 1;  // first value to try; a multiple of `step`
  int64_t most = 1 << 20;
  bool doubles = false;  // only `first` times powers of two are valid
};

/// Returns the largest multiple of the axis' step for which `fits` returns
/// true; 0 if there is none. Doubles the first value until it does not fit,
/// then bisects.
int64_t search(const Axis& axis, const std::function<bool(int64_t)>& fits) {
  const int64_t step = axis.step;
  int64_t good = 0;
  int64_t bad = axis.first / step;  // in steps
  while (bad * step <= axis.most && fits(bad * step)) {
    good = bad;
    bad *= 2;
  }
  if (axis.doubles) return good * step;
  if (bad * step > axis.most) bad = axis.most / step + 1;
  while (bad - good > 1) {
    const int64_t middle = good + (bad - good) / 2;
    (fits(middle * step) ? good : bad) = middle;
  }
  return good * step;
}

bool takes_image_size(const TrainConfig& config, int64_t size) {
  ModelOptions options = config.model_options;
  options.image_size = size;
  try {
    make_model(config.model, options);
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

/// Returns the number that image sizes must be a multiple of: 1, the patch
/// size, or the total stride of the model.
int64_t image_step(const TrainConfig& config) {
  for (const int64_t step : {1, 2, 4, 8, 16}) {
    if (takes_image_size(config, 32 + step)) return step;
  }
  return 32;
}

Axis axis_of(LargestAxis axis, const TrainConfig& config) {
  switch (axis) {
    case LargestAxis::kBatch:
      return {nullptr, 1, 1};
    case LargestAxis::kImageSize:
      // cnn-basic accepts only 28 (the size of MNIST images) times powers of
      // two.
      if (!takes_image_size(config, 32)) {
        return {&ModelOptions::image_size, 28, 28, 3584, true};
      }
      return {&ModelOptions::image_size, image_step(config), 32, 1 << 14};
    case LargestAxis::kSeq:
      return {&ModelOptions::seq, 1, 32};
    case LargestAxis::kDepth:
      return {&ModelOptions::depth, 1, 1, 1 << 14};
  }
  TORCH_INTERNAL_ASSERT(false, "unknown axis");
}

/// Measures memory at one value of an axis, with all state on the device or, if `moved`, as
/// much of it as possible in host memory.
class Trial {
 public:
  Trial(TrainConfig config, const PlanningOptions& options, bool moved) {
    TrainingCosts::Options measuring;
    PlanningOptions quick = options;
    quick.quick = true;
    if (moved) {
      config.state = StatePlace::kHostAll;
    } else if (config.state == StatePlace::kAuto) {
      config.state = StatePlace::kDevice;
    }
    TrainSetup setup = settled(make_setup(plain(config)), quick);
    // A training within a budget would choose the same.
    if (setup.options.weight_copies == WeightCopiesMode::kAuto &&
        setup.device.is_cuda()) {
      setup.options.weight_copies = WeightCopiesMode::kEach;
    }
    measuring.memory_only = true;
    measuring.progress = options.progress;
    if (setup.state_memory) host_limit_ = setup.state_memory->limit_bytes();
    costs_.emplace(std::move(setup), measuring);
  }

  PlanResult plan(const PlanRequest& request) {
    PlanResult result = detail::plan_with(*costs_, request);
    if (result.plan.host_state.total() > host_limit_) result.feasible = false;
    return result;
  }

 private:
  int64_t host_limit_ = 0;
  std::optional<TrainingCosts> costs_;
};

class LargestSearch {
 public:
  LargestSearch(const TrainConfig& config, LargestAxis axis,
                const PlanRequest& request, const PlanningOptions& options)
      : config_(config),
        axis_(axis_of(axis, config)),
        request_(request),
        options_(options) {
    result_.axis = axis;
    TORCH_CHECK(request.memory > 0, "[--largest] needs --memory");
  }

  Largest run() {
    result_.plain = search(axis_, [&](int64_t v) { return fits(v, true); });
    moved_ = moving_saves();
    result_.value = search(axis_, [&](int64_t v) { return fits(v, false); });
    return result_;
  }

 private:
  /// Whether plans need less memory with state in host memory, at the size that fits without
  /// any technique.
  bool moving_saves() {
    if (config_.state != StatePlace::kAuto ||
        !detail::parameters_refusal(config_).empty()) {
      return false;
    }
    const int64_t value = std::max(result_.plain, axis_.first);
    const auto smallest = [&](bool moved) {
      moved_ = moved;
      auto [config, request] = at(value, /*plainly=*/false);
      request.memory = 1;
      try {
        return trial(config, value).plan(request).smallest_bytes;
      } catch (const c10::OutOfMemoryError&) {
        return std::numeric_limits<int64_t>::max();
      }
    };
    const int64_t resident = smallest(false);
    return smallest(true) < resident;
  }

  std::pair<TrainConfig, PlanRequest> at(int64_t value, bool plainly) const {
    PlanRequest request = request_;
    TrainConfig config = config_;
    if (axis_.option == nullptr) {
      request.global_batch = request.micro_batch = value;
    } else {
      config.model_options.*axis_.option = value;
      if (plainly) request.micro_batch = request.global_batch;
    }
    request.strategy = plainly ? "none" : "";
    return {std::move(config), std::move(request)};
  }

  bool fits(int64_t value, bool plainly) {
    const auto [config, request] = at(value, plainly);
    if (options_.progress) {
      options_.progress(fmt::format("{} {}, {}", to_text(result_.axis), value,
                                    plainly ? "no technique" : "planned"));
    }
    std::optional<PlanResult> found;
    try {
      Trial& here = trial(config, value);
      if (request.micro_batch == 0) found = smallest_micro_batch(here, request);
      if (!found) found = here.plan(request);
    } catch (const c10::Error& error) {
      // It does not fit at all, or the model does not support the size.
      if (value == axis_.first) throw;
      return false;
    }
    if (!found->feasible) return false;
    if (plainly) {
      result_.plain_peak_bytes = found->plan.peak_bytes;
    } else {
      result_.peak_bytes = found->plan.peak_bytes;
      result_.plan.emplace(found->plan);
    }
    return true;
  }

  /// Plans with a micro-batch of 1. If that fits, no other needs to be
  /// measured.
  static std::optional<PlanResult> smallest_micro_batch(Trial& trial,
                                                        PlanRequest request) {
    request.micro_batch = 1;
    try {
      PlanResult result = trial.plan(request);
      if (result.feasible) return result;
    } catch (const c10::Error&) {
      // BatchNorm may need more than one sample.
    }
    return std::nullopt;
  }

  /// Returns the trial for `value`. All batch sizes share one model.
  Trial& trial(const TrainConfig& config, int64_t value) {
    const std::pair key(axis_.option == nullptr ? 0 : value, moved_);
    if (!trial_ || trial_key_ != key) {
      trial_.reset();  // free its memory before the next trial
      trial_.emplace(config, options_, moved_);
      trial_key_ = key;
    }
    return *trial_;
  }

  TrainConfig config_;
  Axis axis_;
  PlanRequest request_;
  PlanningOptions options_;
  std::optional<Trial> trial_;
  std::pair<int64_t, bool> trial_key_{-1, false};
  bool moved_ = false;  // state is in host memory
  Largest result_;
};

}  // namespace

std::unique_ptr<BudgetPlanner> detail::make_budget_planner(
    TrainSetup setup, PlanRequest request, const PlanningOptions& options) {
  return std::make_unique<MeasuringPlanner>(std::move(setup),
                                            std::move(request), options);
}

struct TrainingPlanner::Impl {
  Impl(TrainSetup setup, const PlanningOptions& options)
      : costs(std::move(setup), cost_options(options)) {}
  CostChoice costs;
};

TrainingPlanner::TrainingPlanner(const TrainConfig& config,
                                 const PlanningOptions& options)
    : impl_(std::make_unique<Impl>(settled(make_setup(plain(config)), options),
                                   options)) {}
TrainingPlanner::TrainingPlanner(TrainInputs inputs,
                                 const TrainOptions& training,
                                 const PlanningOptions& options)
    : impl_(std::make_unique<Impl>(
          settled(make_setup(std::move(inputs), plain(training)), options),
          options)) {}
TrainingPlanner::~TrainingPlanner() = default;
TrainingPlanner::TrainingPlanner(TrainingPlanner&&) noexcept = default;
TrainingPlanner& TrainingPlanner::operator=(TrainingPlanner&&) noexcept =
    default;

PlanResult TrainingPlanner::plan(const PlanRequest& request) {
  return impl_->costs.plan(request);
}

ClusterPlan TrainingPlanner::plan(const ClusterRequest& request) {
  return plan_cluster(request, impl_->costs.usual());
}

PlanResult plan_training(const TrainConfig& config, const PlanRequest& request,
                         const PlanningOptions& options) {
  PlanningOptions within = options;
  if (within.memory == 0) within.memory = request.memory;
  return TrainingPlanner(config, within).plan(request);
}

Largest find_largest(const TrainConfig& config, LargestAxis axis,
                     const PlanRequest& request,
                     const PlanningOptions& options) {
  return LargestSearch(config, axis, request, options).run();
}

}  // namespace reprise
