// TrainingCosts: running schedules to see what they take.
#include "compat/cuda.h"
#include "compat/side_stream.h"
#include "plan/evaluation.h"
#include "train/budget/training_costs.h"
#include "train/loop/model_state_guard.h"
#include "train/loop/session.h"
#include "train/step/micro_step.h"
#include "train/step/step_graphs.h"

#include <reprise/memory/out_of_memory.h>
#include <reprise/recompute/execution.h>
#include <reprise/recompute/strategy.h>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>
#include <vector>

namespace reprise::detail {
namespace {

constexpr double kRowMs = 30;         // of micro-batches timed together
constexpr double kLongMs = 500;       // of a micro-batch that is timed twice
constexpr double kVeryLongMs = 1500;  // and of one that is timed once
// How long plans are timed in turn, within these numbers of rounds.
constexpr double kCompareMs = 2000;
constexpr int kFewestRounds = 3;
constexpr int kMostRounds = 9;

/// Of two, the smaller.
double median_of(std::vector<double> values) {
  const auto middle =
      values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// A number that no other comparison has.
int64_t new_row() {
  using std::chrono::microseconds;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<microseconds>(now).count();
}

}  // namespace

void TrainingCosts::measure_factors(CostProfile& profile, SizeCosts& size) {
  const auto mode = from_text<GraphMode>(profile.graph);
  const auto factor = [&](const char* strategy) -> std::optional<double> {
    const Schedule schedule =
        make_schedule(strategy, parts_.model.chain.size());
    const bool graph =
        mode == GraphMode::kOn ||
        (mode == GraphMode::kAuto && fits_graph(profile, size, schedule));
    say(fmt::format("trying a micro-batch of {} in {}", size.micro_batch,
                    profile.precision));
    const auto ms = run_schedule(profile, size, schedule, graph, {});
    if (!ms) return std::nullopt;
    profile.add(
        TriedSchedule{size.micro_batch, schedule.to_text(), *ms, graph});
    // The rest may overlap with the chain's work; it is not all of the time.
    const double chain_ms = std::max(*ms - size.other_ms, *ms / 2);
    return chain_ms / simulate(schedule, size.figures).time_ms;
  };
  const auto cut = factor("all");
  const auto joined = factor("none");
  size.cut_factor = cut.value_or(joined.value_or(1));
  size.joined_factor = joined.value_or(size.cut_factor);
}

bool TrainingCosts::compare(const std::vector<Plan>& plans) {
  if (options_.memory_only) return false;
  const auto stream = trained_stream();
  say(fmt::format("timing {} plans in turn", plans.size()));
  double pass_ms = 0;
  for (const Plan& plan : plans) pass_ms += std::max(plan.micro_ms, kRowMs);
  const int rounds = std::clamp(static_cast<int>(kCompareMs / pass_ms),
                                kFewestRounds, kMostRounds);
  std::vector<std::vector<double>> times(plans.size());
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < plans.size(); ++i) {
      const Plan& plan = plans[i];
      const CostProfile& profile = entry(plan.precision);
      const RowTiming timing{.warm_up = round == 0, .rows = 1};
      const auto ms = run_schedule(profile, profile.at(plan.micro_batch),
                                   plan.schedule, plan.graph, timing);
      if (!ms) return false;
      times[i].push_back(*ms);
    }
  }
  const int64_t row = new_row();
  for (size_t i = 0; i < plans.size(); ++i) {
    const Plan& plan = plans[i];
    CostProfile& profile = entry(plan.precision);
    profile.add(TriedSchedule{plan.micro_batch, plan.schedule.to_text(),
                              median_of(std::move(times[i])), plan.graph, row});
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
      detail::beside_graph(profile, size);
  return options_.memory == 0 || peak <= options_.memory;
}

std::optional<double> TrainingCosts::run_schedule(const CostProfile& profile,
                                                  const SizeCosts& size,
                                                  const Schedule& schedule,
                                                  bool graph,
                                                  const RowTiming& timing) {
  // With gradients there to add to, as from a window's second micro-batch on;
  // a window of one may have no room for them.
  const bool accumulate = graph ? fits_graph(profile, size, schedule)
                                : fits(profile, size, schedule, false);
  if (!accumulate && (graph || !fits(profile, size, schedule, true))) {
    return std::nullopt;
  }
  try {
    const ModelStateGuard undisturbed(parts_.model, parts_.device,
                                      /*parameters=*/false);
    return time_of_row(profile, size.micro_batch, schedule, accumulate, graph,
                       timing);
  } catch (const c10::Error& error) {
    if (!is_out_of_memory(error)) throw;
    if (parts_.device.is_cuda()) compat::empty_cuda_cache();
    return std::nullopt;  // another schedule may fit all the same
  }
}

double TrainingCosts::time_of_row(const CostProfile& profile,
                                  int64_t micro_batch, const Schedule& schedule,
                                  bool accumulate, bool graph,
                                  const RowTiming& timing) {
  Execution execution(parts_.model.chain, schedule);
  const auto made = copies(profile.precision);
  Batches batches(parts_, micro_batch, make_batch(micro_batch));
  Batch batch;
  std::vector<torch::Tensor> parameters = parts_.model.root->parameters();
  std::erase_if(parameters, [](const auto& p) { return !p.requires_grad(); });
  MicroStep micro(
      parts_.device,
      autocast_of(from_text<Precision>(profile.precision), parts_.device),
      MicroStep::small_of(parts_.device, parameters));
  micro.set_weight(1e-6);
  if (accumulate) {
    for (auto& p : parameters) p.mutable_grad() = torch::zeros_like(p);
  }
  StepGraphs graphs({.device = parts_.device,
                     .mode = graph ? GraphMode::kAuto : GraphMode::kOff,
                     .parameters = parameters,
                     .buffers = parts_.model.root->buffers()});
  const auto step = [&] {
    if (!accumulate) {
      for (auto& p : parameters) p.mutable_grad().reset();
    }
    batch = batches.next();
    move_to(batch, parts_.device);
    prepare(batch, parts_.prepare);
    const auto run = [&](const Tensors& inputs) {
      micro.run(execution, inputs);
    };
    const Tensors inputs = {batch.inputs, batch.targets};
    const compat::CaptureExpected capture(graphs.active());
    if (!graphs.run(inputs, run)) run(inputs);
  };
  const bool cuda = parts_.device.is_cuda();
  // The caching allocator needs a few to find its blocks.
  const int warm_up = cuda ? 3 : timing.warm_up ? 1 : 0;
  for (int i = 0; i < warm_up; ++i) step();
  // A row long enough for the host to run ahead as it does in training. On the CPU
  // a long micro-batch is a row by itself, and of those two or one are enough.
  const double about_ms = std::max(time_of(parts_.device, 1, step), 0.1);
  const int enough = static_cast<int>(std::ceil(kRowMs / about_ms));
  const int in_a_row = std::max(enough, !cuda ? 1 : enough > 1 ? 5 : 2);
  const int most_rows = about_ms >= kVeryLongMs ? 1
                        : about_ms >= kLongMs   ? 2
                                                : 3;
  const auto rows = static_cast<size_t>(std::min(timing.rows, most_rows));
  std::vector<double> row_ms;
  if (!cuda && in_a_row == 1) row_ms.push_back(about_ms);
  while (row_ms.size() < rows) {
    const auto row = [&] {
      for (int i = 0; i < in_a_row; ++i) step();
    };
    row_ms.push_back(time_of(parts_.device, 1, row) / in_a_row);
  }
  return median_of(std::move(row_ms));
}

}  // namespace reprise::detail
