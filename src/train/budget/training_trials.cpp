// TrainingCosts: schedule trials and comparison of plans.
// Tested by tests/train/budget/planning_test.cpp.
#include "compat/cuda.h"
#include "plan/evaluator.h"
#include "plan/gradient_costs.h"
#include "train/budget/model_state_guard.h"
#include "train/budget/schedule_timer.h"
#include "train/budget/training_costs.h"

#include <reprise/memory/meter.h>
#include <reprise/recompute/strategy.h>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

namespace reprise::detail {
namespace {

constexpr double kShortestRowMs = 30;
// Time for a comparison, in which plans are timed in turn, and bounds for the
// number of rounds.
constexpr double kCompareMs = 2000;
constexpr int kFewestRounds = 3;
constexpr int kMostRounds = 9;

/// Returns a unique number for a comparison.
int64_t new_row() {
  using std::chrono::microseconds;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<microseconds>(now).count();
}

}  // namespace

void TrainingCosts::measure_factors(CostProfile& profile, SizeCosts& size) {
  const GraphMode mode = profile.graph;
  const auto factor = [&](const char* strategy) -> std::optional<double> {
    const Schedule schedule =
        make_schedule(strategy, setup_.model.chain.size());
    const bool graph =
        mode == GraphMode::kOn ||
        (mode == GraphMode::kAuto && fits_graph(profile, size, schedule));
    say(fmt::format("trying a micro-batch of {} in {}", size.micro_batch,
                    to_text(profile.precision)));
    const auto ms = run_schedule(profile, size, schedule, {.graph = graph}, {});
    if (!ms) return std::nullopt;
    profile.add(
        TriedSchedule{size.micro_batch, schedule.to_text(), *ms, graph});
    // Other work may overlap with the chain, so at least half of the time
    // counts.
    const double chain_ms = std::max(*ms - size.other_ms, *ms / 2);
    return chain_ms /
           simulate(schedule, accumulating_costs(size.chain_costs, profile,
                                                 /*first=*/false))
               .time_ms;
  };
  const auto cut = factor("all");
  const auto joined = factor("none");
  size.separate_graphs_factor = cut.value_or(joined.value_or(1));
  size.single_graph_factor = joined.value_or(size.separate_graphs_factor);
}

void TrainingCosts::measure_last_update(CostProfile& profile, const Plan& plan,
                                        double micro_ms) {
  const auto ms = run_schedule(profile, profile.at(plan.micro_batch),
                               plan.schedule, {plan.graph, plan.update}, {});
  if (ms) profile.update_ms = std::max(0.0, *ms - micro_ms);
}

bool TrainingCosts::compare(const std::vector<Plan>& plans) {
  if (options_.memory_only) return false;
  const auto stream = trained_stream();
  say(fmt::format("timing {} plans in turn", plans.size()));
  double pass_ms = 0;
  for (const Plan& plan : plans)
    pass_ms += std::max(plan.micro_ms, kShortestRowMs);
  const int rounds = std::clamp(static_cast<int>(kCompareMs / pass_ms),
                                kFewestRounds, kMostRounds);
  const auto update_of = [this](const Plan& plan) {
    return timed_update(entry(plan.precision), plan.update, plan.micro_batch,
                        plan.global_batch);
  };
  std::vector<std::vector<double>> times(plans.size());
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < plans.size(); ++i) {
      const Plan& plan = plans[i];
      const CostProfile& profile = entry(plan.precision);
      const ScheduleTimer::Timing timing{.warm_up = round == 0, .rows = 1};
      const auto ms =
          run_schedule(profile, profile.at(plan.micro_batch), plan.schedule,
                       {plan.graph, update_of(plan)}, timing);
      if (!ms) return false;
      times[i].push_back(*ms);
    }
  }
  const int64_t row = new_row();
  for (size_t i = 0; i < plans.size(); ++i) {
    const Plan& plan = plans[i];
    CostProfile& profile = entry(plan.precision);
    profile.add(TriedSchedule{plan.micro_batch, plan.schedule.to_text(),
                              median_of(std::move(times[i])), plan.graph, row,
                              update_of(plan)});
    keep(profile);
  }
  return true;
}

bool TrainingCosts::fits(const CostProfile& profile, const SizeCosts& size,
                         const Schedule& schedule, bool first) const {
  return options_.memory == 0 ||
         detail::micro_batch_peak(profile, size, schedule, first) <=
             options_.memory;
}

bool TrainingCosts::fits_graph(const CostProfile& profile,
                               const SizeCosts& size,
                               const Schedule& schedule) const {
  const int64_t peak =
      detail::micro_batch_peak(profile, size, schedule, false) +
      detail::cuda_graph_extra_bytes(profile, size);
  return options_.memory == 0 || peak <= options_.memory;
}

bool TrainingCosts::fits_updating(const CostProfile& profile,
                                  const SizeCosts& size,
                                  const Schedule& schedule, bool graph) const {
  const int64_t extra =
      graph ? cuda_graph_extra_bytes(profile, size, UpdateMode::kBackward) : 0;
  return options_.memory == 0 ||
         updating_peak(profile, size, schedule) + extra <= options_.memory;
}

std::optional<double> TrainingCosts::run_schedule(
    const CostProfile& profile, const SizeCosts& size, const Schedule& schedule,
    Mode mode, const ScheduleTimer::Timing& timing) {
  const bool updates = mode.update == UpdateMode::kBackward;
  // The trial has an optimizer of its own.
  if (updates && options_.training) return std::nullopt;
  if (updates && !fits_updating(profile, size, schedule, mode.graph)) {
    return std::nullopt;
  }
  // Add to existing gradients, as all micro-batches of a window but the first
  // do. They may not fit if the window has one micro-batch.
  const bool accumulate =
      !updates && (mode.graph ? fits_graph(profile, size, schedule)
                              : fits(profile, size, schedule, false));
  if (!accumulate && !updates &&
      (mode.graph || !fits(profile, size, schedule, true))) {
    return std::nullopt;
  }
  try {
    place_parameters();
    const ModelStateGuard guard(setup_, /*parameters=*/false);
    return ScheduleTimer(setup_).time(
        {profile.precision, size.micro_batch, schedule, accumulate, mode.graph,
         mode.update},
        make_batch(size.micro_batch), timing);
  } catch (const c10::Error& error) {
    if (!is_out_of_memory(error)) throw;
    if (setup_.device.is_cuda()) compat::empty_cuda_cache();
    return std::nullopt;  // another schedule may still fit
  }
}

}  // namespace reprise::detail
