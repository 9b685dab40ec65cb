// Tested by tests/tools/study_command_test.sh.
#include "plan/evaluator.h"
#include "train/budget/device_settings.h"
#include "train/budget/training_costs.h"

#include <reprise/train/planning.h>

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

namespace reprise {
namespace {

using detail::Evaluator;
using detail::make_setup;
using detail::TrainingCosts;

/// Returns the part of the configuration that determines the measurements.
TrainConfig common_part(TrainConfig config) {
  config.batch = config.accumulate = config.global_batch = 1;
  config.recompute = "none";
  config.memory_limit = 0;
  config.steps = 1;
  config.epochs = 0;
  config.seconds = 0;
  config.evaluate = false;
  config.seed = 1;
  config.graph = GraphMode::kOff;
  config.update = UpdateMode::kAuto;
  return config;
}

/// Returns the two sizes to measure. The larger one is bounded, so that the
/// measurement does not take longer than the run that it predicts.
std::set<int64_t> sizes_to_measure(const std::set<int64_t>& sizes) {
  const int64_t small = *sizes.begin();
  int64_t large = small;
  for (const int64_t size : sizes) {
    if (size <= 4 * small) large = size;
  }
  if (large == small && sizes.size() > 1) large = *std::next(sizes.begin());
  return {small, large};
}

class Group {
 public:
  Group(const TrainConfig& config, const PlanningOptions& options)
      : precision_(config.precision) {
    TrainingCosts::Options measuring;
    measuring.memory_only = true;
    measuring.progress = options.progress;
    detail::TrainSetup setup = make_setup(common_part(config));
    const auto ranks = detail::make_ranks(nullptr);
    detail::settle_device_settings(setup, *ranks, {.measure = false});
    costs_.emplace(std::move(setup), measuring);
  }

  void measure(const std::set<int64_t>& sizes) {
    for (const int64_t size : sizes_to_measure(sizes)) {
      costs_->measure(precision_, size);
    }
  }

  std::optional<TrainingPrediction> predict(const TrainConfig& config) {
    const CostProfile& profile = costs_->profile(precision_);
    if (profile.sizes.empty() || config.plans_micro_batch()) return {};
    const bool optimal = config.plans_schedule();
    const GraphMode mode = profile.graph;
    const auto plan_with = [&](bool graph, UpdateMode update) {
      const Evaluator evaluator(profile, config.batch, config.global_batch,
                                optimal                  ? ""
                                : config.plans_if_long() ? "none"
                                                         : config.recompute,
                                graph, update);
      return optimal ? evaluator.fastest(config.memory_limit)
                           .value_or(evaluator.smallest())
                     : evaluator.smallest();
    };
    const UpdateMode update =
        config.update == UpdateMode::kBackward || profile.updates_in_last()
            ? UpdateMode::kBackward
            : UpdateMode::kAfter;
    Plan plan = plan_with(mode != GraphMode::kOff, update);
    const auto exceeds = [&] {
      return config.memory_limit > 0 && plan.peak_bytes > config.memory_limit;
    };
    if (mode == GraphMode::kAuto && exceeds()) plan = plan_with(false, update);
    if (optimal && exceeds() && config.update == UpdateMode::kAuto &&
        config.accumulate == 1 && profile.update == UpdateMode::kAuto) {
      plan = plan_with(false, UpdateMode::kBackward);
    }
    return TrainingPrediction{plan.peak_bytes, plan.step_ms};
  }

 private:
  Precision precision_;
  std::optional<TrainingCosts> costs_;
};

}  // namespace

std::vector<std::optional<TrainingPrediction>> predict_trainings(
    const std::vector<TrainConfig>& configs, const PlanningOptions& options) {
  std::map<std::string, std::vector<size_t>> groups;
  for (size_t i = 0; i < configs.size(); ++i) {
    groups[to_json(common_part(configs[i]))].push_back(i);
  }
  std::vector<std::optional<TrainingPrediction>> predictions(configs.size());
  for (const auto& [key, members] : groups) {
    const TrainConfig& first = configs[members.front()];
    if (options.progress) {
      options.progress(fmt::format("measuring {}, {}, {}", first.model,
                                   to_text(first.precision),
                                   first.optimizer.name));
    }
    std::set<int64_t> sizes;
    for (const size_t i : members) {
      if (configs[i].batch > 0) sizes.insert(configs[i].batch);
    }
    if (sizes.empty()) continue;
    try {
      Group group(first, options);
      group.measure(sizes);
      for (const size_t i : members) {
        predictions[i] = group.predict(configs[i]);
      }
    } catch (const c10::Error&) {
      // The run itself will report the error.
    }
  }
  return predictions;
}

}  // namespace reprise
