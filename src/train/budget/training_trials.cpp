// TrainingCosts: schedule trials and comparison of plans.
// Tested by tests/train/budget/planning_test.cpp.
#include "compat/cuda.h"
#include "plan/evaluator.h"
#include "plan/gradient_costs.h"
#include "train/budget/model_state_guard.h"
#include "train/budget/schedule_timer.h"
#include "train/budget/training_costs.h"
#include "train/config/update_refusal.h"

#include <reprise/memory/meter.h>
#include <reprise/recompute/strategy.h>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>
#include <vector>

namespace reprise::detail {
namespace {

// Time for a comparison, in which plans are timed in turn, and bounds for the
// number of rounds.
constexpr double kCompareMs = 2000;
constexpr int kFewestRounds = 3;
constexpr int kMostRounds = 9;
// Trials of micro-batches that take so long on a CUDA device are not repeated in turn with
// others.
constexpr double kReliableMs = 60;

/// Returns a unique number for a comparison.
int64_t new_row() {
  using std::chrono::microseconds;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<microseconds>(now).count();
}

/// Returns a measured size whose factors hold for `micro_batch` as well: there are a smaller and
/// a larger one, and the stages' times predict the time of both. Null if there is none.
const SizeCosts* find_alike(const CostProfile& profile, int64_t micro_batch) {
  constexpr double kAlike = 0.03;
  const auto exact = [](const SizeCosts& size) {
    return std::abs(size.separate_graphs_factor - 1) < kAlike &&
           std::abs(size.single_graph_factor - 1) < kAlike;
  };
  const SizeCosts* below = nullptr;
  for (const SizeCosts& size : profile.sizes) {  // in ascending order
    if (size.micro_batch < micro_batch) {
      below = &size;
    } else {
      return below != nullptr && exact(*below) && exact(size) ? below : nullptr;
    }
  }
  return nullptr;
}

}  // namespace

void TrainingCosts::measure_factors(CostProfile& profile, SizeCosts& size) {
  if (const SizeCosts* other = find_alike(profile, size.micro_batch)) {
    size.separate_graphs_factor = other->separate_graphs_factor;
    size.single_graph_factor = other->single_graph_factor;
    return;
  }
  const GraphMode mode = profile.graph;
  const auto factor = [&](const char* strategy) -> std::optional<double> {
    const Schedule schedule =
        make_schedule(strategy, setup_.model.chain.size());
    const bool graph =
        mode == GraphMode::kOn ||
        (mode == GraphMode::kAuto && fits_graph(profile, size, schedule, {}));
    say(fmt::format("trying a micro-batch of {} in {}", size.micro_batch,
                    to_text(profile.precision)));
    const auto trial =
        run_schedule(profile, size, schedule, {.graph = graph}, {});
    if (!trial) return std::nullopt;
    const double ms = trial->ms;
    // If the last micro-batch of a window updates, a trial is complete only with it.
    if (!profile.updates_in_last()) {
      profile.add(TriedSchedule{size.micro_batch, schedule.to_text(), ms, graph,
                                /*comparison=*/0, UpdateMode::kAfter,
                                trial->extra_bytes});
    }
    // Other work may overlap with the chain, so at least half of the time
    // counts.
    const double chain_ms = std::max(ms - size.other_ms, ms / 2);
    const ChainCosts& stages =
        graph ? without_launches(size.chain_costs) : size.chain_costs;
    return chain_ms / simulate(schedule, accumulating_costs(stages, profile,
                                                            /*first=*/false))
                          .time_ms;
  };
  const auto cut = factor("all");
  const auto joined = factor("none");
  size.separate_graphs_factor = cut.value_or(joined.value_or(1));
  size.single_graph_factor = joined.value_or(size.separate_graphs_factor);
}

void TrainingCosts::measure_last_update(CostProfile& profile, const Plan& plan,
                                        TriedSchedule& tried) {
  Mode mode = mode_of(plan, plan.update);
  mode.window = true;
  const auto pair = run_schedule(profile, profile.at(plan.micro_batch),
                                 plan.schedule, mode, {});
  tried.extra_bytes = pair ? pair->extra_bytes : 0;
  if (pair) profile.update_ms = std::max(0.0, 2 * (pair->ms - tried.ms));
}

bool TrainingCosts::compare(const std::vector<Plan>& plans) {
  // Rounds of several plans would take long, too.
  const bool has_long =
      setup_.device.is_cuda() &&
      std::any_of(plans.begin(), plans.end(), [](const Plan& plan) {
        return plan.micro_ms >= kReliableMs;
      });
  if (options_.memory_only || has_long) return false;
  const auto stream = trained_stream();
  say(fmt::format("timing {} plans in turn", plans.size()));
  // Including what precedes the timed micro-batches of a round, such as a capture.
  const auto start = std::chrono::steady_clock::now();
  const auto is_enough = [&](int rounds) {
    const std::chrono::duration<double, std::milli> spent =
        std::chrono::steady_clock::now() - start;
    return rounds >= kFewestRounds && spent.count() >= kCompareMs;
  };
  const auto update_of = [this](const Plan& plan) {
    return timed_update(entry(plan.precision), plan.update, plan.micro_batch,
                        plan.global_batch);
  };
  std::vector<std::vector<double>> times(plans.size());
  std::vector<int64_t> extra(plans.size(), 0);
  for (int round = 0; round < kMostRounds && !is_enough(round); ++round) {
    for (size_t i = 0; i < plans.size(); ++i) {
      const Plan& plan = plans[i];
      const CostProfile& profile = entry(plan.precision);
      const ScheduleTimer::Timing timing{.warm_up = round == 0, .rows = 1};
      const auto trial =
          run_schedule(profile, profile.at(plan.micro_batch), plan.schedule,
                       mode_of(plan, update_of(plan)), timing);
      if (!trial) return false;
      times[i].push_back(trial->ms);
      extra[i] = std::max(round > 0 ? extra[i] : trial->extra_bytes,
                          trial->extra_bytes);
    }
  }
  const int64_t row = new_row();
  for (size_t i = 0; i < plans.size(); ++i) {
    const Plan& plan = plans[i];
    CostProfile& profile = entry(plan.precision);
    const std::string text = plan.schedule.to_text();
    // With an update it may be larger.
    if (const auto* earlier = profile.find_tried(plan.micro_batch, text,
                                                 plan.graph, update_of(plan))) {
      extra[i] = std::max(extra[i], earlier->extra_bytes);
    }
    profile.add(TriedSchedule{plan.micro_batch, text,
                              median_of(std::move(times[i])), plan.graph, row,
                              update_of(plan), extra[i]});
    keep(profile);
  }
  return true;
}

bool TrainingCosts::fits(const CostProfile& profile, const SizeCosts& size,
                         const Schedule& schedule, bool first,
                         const Mode& mode) const {
  return is_allowed(micro_batch_peak(profile, size, schedule, first), mode);
}

bool TrainingCosts::fits_graph(const CostProfile& profile,
                               const SizeCosts& size, const Schedule& schedule,
                               const Mode& mode) const {
  return is_allowed(micro_batch_peak(profile, size, schedule, false) +
                        cuda_graph_extra_bytes(profile, size),
                    mode);
}

bool TrainingCosts::fits_updating(const CostProfile& profile,
                                  const SizeCosts& size,
                                  const Schedule& schedule,
                                  const Mode& mode) const {
  const int64_t extra =
      mode.graph ? cuda_graph_extra_bytes(profile, size, UpdateMode::kBackward)
                 : 0;
  return is_allowed(updating_peak(profile, size, schedule) + extra, mode);
}

std::shared_ptr<Optimizer> TrainingCosts::trial_optimizer(Precision precision) {
  TrainSetup setup = setup_;
  setup.options.precision = precision;
  if (!state_on_host(setup.options.state)) return measured_optimizer_of(setup);
  if (!trial_optimizer_ || trial_precision_ != precision) {
    trial_optimizer_.reset();  // before the next one is allocated
    trial_optimizer_ = measured_optimizer_of(setup);
    trial_precision_ = precision;
  }
  return trial_optimizer_;
}

std::optional<TrainingCosts::Trial> TrainingCosts::run_schedule(
    const CostProfile& profile, const SizeCosts& size, const Schedule& schedule,
    Mode mode, const ScheduleTimer::Timing& timing) {
  const bool updates = mode.update == UpdateMode::kBackward;
  // The trial has an optimizer of its own.
  if (updates && options_.training) return std::nullopt;
  if (updates &&
      !(mode.window ? fits(profile, size, schedule, false, mode)
                    : fits_updating(profile, size, schedule, mode))) {
    return std::nullopt;
  }
  // Add to existing gradients, as all micro-batches of a window but the first
  // do. They may not fit if the window has one micro-batch.
  const bool accumulate =
      mode.window ||
      (!updates && (mode.graph ? fits_graph(profile, size, schedule, mode)
                               : fits(profile, size, schedule, false, mode)));
  if (!accumulate && !updates &&
      (mode.graph || !fits(profile, size, schedule, true, mode))) {
    return std::nullopt;
  }
  try {
    place_parameters();
    const ModelStateGuard guard(setup_, /*parameters=*/false);
    const auto optimizer =
        updates ? trial_optimizer(profile.precision) : nullptr;
    const auto result = ScheduleTimer(setup_).time(
        {profile.precision, size.micro_batch, schedule, accumulate, mode.graph,
         mode.update, optimizer.get()},
        make_batch(size.micro_batch), timing);
    Trial trial{result.ms};
    // Beside a training, its gradients and its optimizer's state are on the device as well.
    if (options_.training) return trial;
    CostProfile alone = profile;
    alone.exchange = {};
    int64_t expected =
        updates && !mode.window
            ? updating_peak(profile, size, schedule)
            : micro_batch_peak(alone, size, schedule, !accumulate);
    // The graph's memory does not count between its runs, when batches are prepared.
    if (mode.graph) expected += size.data_bytes + size.graph_workspace_bytes;
    // One that measurements share holds the part of its state that stays on the device.
    if (!updates && !trial_optimizer_) expected -= profile.fixed.optimizer;
    trial.extra_bytes = result.peak_bytes - expected;
    return trial;
  } catch (const c10::Error& error) {
    if (!is_out_of_memory(error)) throw;
    if (setup_.device.is_cuda()) compat::empty_cuda_cache();
    return std::nullopt;  // another schedule may still fit
  }
}

}  // namespace reprise::detail
