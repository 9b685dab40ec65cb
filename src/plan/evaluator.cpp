#include "plan/evaluator.h"

#include "plan/gradient_costs.h"

#include <reprise/recompute/execution.h>
#include <reprise/recompute/strategy.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace reprise::detail {
namespace {

int64_t sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

/// Interpolates between the factors for one autograd graph and for one graph
/// per stage. There are at least `min_graphs` of them.
double time_factor(const SizeCosts& costs, const Schedule& schedule,
                   int min_graphs) {
  const int most = schedule.stages() - 1;
  const int graphs = std::max(graph_count(schedule), min_graphs);
  const double share = most > 0 ? static_cast<double>(graphs - 1) / most : 0.0;
  return costs.single_graph_factor +
         (costs.separate_graphs_factor - costs.single_graph_factor) * share;
}

/// Returns the time of a micro-batch if each stage runs once, as its fastest
/// variant.
double min_stages_ms(const ChainCosts& chain_costs) {
  double device_ms = 0, launch_ms = 0;
  for (const StageCosts& stage : chain_costs.stages) {
    double device = stage.forward_ms + stage.backward_ms;
    double launch = stage.forward_launch_ms + stage.backward_launch_ms;
    for (const auto& variant : stage.variants) {
      device = std::min(device, variant.forward_ms + variant.backward_ms);
      launch = std::min(launch,
                        variant.forward_launch_ms + variant.backward_launch_ms);
    }
    device_ms += device;
    launch_ms += launch;
  }
  return std::max(device_ms, launch_ms);
}

/// Returns a lower bound on the peak of all schedules: the outputs of a running
/// stage, or the activations that a stage saves for its own backward.
int64_t min_chain_peak(const ChainCosts& chain_costs) {
  int64_t most = 0;
  int64_t gradient = chain_costs.output_gradient_bytes;
  for (size_t i = chain_costs.stages.size(); i-- > 0;) {
    const StageCosts& stage = chain_costs.stages[i];
    int64_t forward = stage.drop_extra_bytes;
    int64_t backward = stage.saved_bytes + stage.backward_extra_bytes;
    const auto lower = [&](const KeptRunCosts& run) {
      forward = std::min(forward, run.saved_bytes + run.keep_extra_bytes);
      backward = std::min(backward, run.saved_bytes + run.backward_extra_bytes);
    };
    lower(stage);
    for (const auto& variant : stage.variants) lower(variant);
    for (const auto& buffer : stage.outputs) {
      if (buffer.input < 0) forward += buffer.bytes;
    }
    most = std::max({most, forward, backward + gradient});
    gradient = stage.input_gradient_bytes;
  }
  return most;
}

/// Returns the schedule that keeps every stage as its fastest variant.
Schedule keep_fastest(const ChainCosts& chain_costs) {
  const auto n = static_cast<int>(chain_costs.stages.size());
  std::vector<Op> ops;
  for (int i = 0; i < n; ++i) {
    const StageCosts& stage = chain_costs.stages[static_cast<size_t>(i)];
    int fastest = 0;
    const auto ms = [&](int variant) {
      const auto& run = stage.kept_run(variant);
      return run.forward_ms + run.backward_ms;
    };
    for (int v = 1; v <= static_cast<int>(stage.variants.size()); ++v) {
      if (ms(v) < ms(fastest)) fastest = v;
    }
    ops.push_back({OpKind::kForwardKeep, i, fastest});
  }
  for (int i = n; i-- > 0;) ops.push_back({OpKind::kBackward, i});
  return {"optimal", n, std::move(ops)};
}

/// Adds what was not predicted to the workspaces. If it is negative and they have less, it is
/// taken from what follows, which was predicted too large.
void add_extra(PeakReport& report, int64_t extra_bytes) {
  report.workspace += extra_bytes;
  for (int64_t* part : {&report.gradients, &report.in_flight, &report.kept}) {
    if (report.workspace >= 0) return;
    const int64_t taken = std::min(*part, -report.workspace);
    *part -= taken;
    report.workspace += taken;
  }
}

/// The profile without what depends on the micro-batch.
CostProfile without_sizes(CostProfile profile) {
  profile.sizes.clear();
  profile.tried.clear();
  return profile;
}

}  // namespace

int64_t micro_batch_peak(const CostProfile& profile, const SizeCosts& size,
                         const Schedule& schedule, bool first) {
  const ChainCosts chain_costs =
      accumulating_costs(size.chain_costs, profile, first);
  return profile.fixed.total() - (first ? profile.fixed.gradients : 0) +
         size.data_bytes + size.workspace_bytes +
         simulate(schedule, chain_costs).peak_bytes;
}

int64_t updating_peak(const CostProfile& profile, const SizeCosts& size,
                      const Schedule& schedule) {
  const ChainCosts chain_costs = updating_costs(size.chain_costs, profile);
  return profile.fixed.total() - profile.fixed.gradients + size.data_bytes +
         size.workspace_bytes + simulate(schedule, chain_costs).peak_bytes;
}

int64_t cuda_graph_extra_bytes(const CostProfile& profile,
                               const SizeCosts& size, UpdateMode update) {
  const int64_t updating =
      update == UpdateMode::kBackward ? 0 : profile.update_bytes;
  const int64_t preparing = size.prepare_bytes - size.data_bytes;
  return size.data_bytes + size.graph_workspace_bytes +
         std::max({updating, preparing, int64_t{0}});
}

UpdateMode timed_update(const CostProfile& profile, UpdateMode update,
                        int64_t micro_batch, int64_t global_batch) {
  const bool several = profile.updates_in_last() && micro_batch < global_batch;
  return several ? UpdateMode::kAfter : update;
}

ChainCosts without_launches(ChainCosts chain_costs) {
  const auto change = [](KeptRunCosts& run) {
    run.forward_launch_ms = run.backward_launch_ms = 0;
  };
  for (StageCosts& stage : chain_costs.stages) {
    change(stage);
    for (auto& variant : stage.variants) change(variant);
  }
  return chain_costs;
}

double least_step_ms(const CostProfile& profile, int64_t global_batch) {
  const bool graph = profile.graph != GraphMode::kOff;
  double least = 0;
  for (const SizeCosts& size : profile.sizes) {
    const Evaluator evaluator(profile, size.micro_batch, global_batch,
                              /*strategy=*/"", graph);
    const double ms = evaluator.min_step_ms();
    least = least == 0 ? ms : std::min(least, ms);
  }
  return least;
}

Evaluator::Evaluator(const CostProfile& profile, int64_t micro_batch,
                     int64_t global_batch, std::string strategy, bool graph,
                     UpdateMode update)
    : profile_(without_sizes(profile)),
      fixed_(profile.fixed),
      graph_(graph),
      update_(update),
      global_batch_(global_batch),
      costs_(profile.at(micro_batch)),
      accumulate_((global_batch + micro_batch - 1) / micro_batch),
      cuda_graph_extra_bytes_(
          graph ? cuda_graph_extra_bytes(profile, costs_, update) : 0),
      strategy_(std::move(strategy)) {
  TORCH_INTERNAL_ASSERT(update == UpdateMode::kAfter || accumulate_ == 1 ||
                        profile.updates_in_last());
  if (graph) profile_.exchange = profile_.exchange_of_graph;
  const int64_t last = global_batch - (accumulate_ - 1) * micro_batch;
  last_costs_ = last == micro_batch ? costs_ : profile.at(last);
  if (graph) {
    for (SizeCosts* costs : {&costs_, &last_costs_}) {
      costs->chain_costs = without_launches(std::move(costs->chain_costs));
    }
  }
  fixed_.workspace +=
      std::max(costs_.workspace_bytes, last_costs_.workspace_bytes);
  set_bounds();
}

void Evaluator::set_bounds() {
  min_stages_ms_ = min_stages_ms(costs_.chain_costs);
  if (!strategy_.empty()) {
    const Plan plan = of_strategy(strategy_);
    min_peak_bytes_ = plan.peak_bytes;
    min_step_ms_ = plan.step_ms;
    return;
  }
  const auto window_of = [](const SizeCosts& costs, double sum_ms) {
    return sum_ms * std::min(costs.separate_graphs_factor,
                             costs.single_graph_factor) +
           costs.other_ms;
  };
  min_peak_bytes_ = std::max(base_bytes() + min_chain_peak(with_gradients()),
                             other_peak_bytes());
  min_step_ms_ =
      static_cast<double>(accumulate_ - 1) * window_of(costs_, min_stages_ms_) +
      window_of(last_costs_, min_stages_ms(last_costs_.chain_costs)) +
      update_ms();
}

double Evaluator::update_ms() const {
  // If the last of several micro-batches updates, a trial of such windows gives the time.
  const bool parts = update_ == UpdateMode::kBackward &&
                     !profile_.updates_in_last() &&
                     profile_.backward_update_ms > 0;
  return parts ? std::min(profile_.update_ms, profile_.backward_update_ms)
               : profile_.update_ms;
}

const Solver& Evaluator::solver() const {
  if (!solver_) solver_ = std::make_unique<const Solver>(with_gradients());
  return *solver_;
}

int64_t Evaluator::solver_bytes() const {
  return solver_ ? solver_->table_bytes() : 0;
}

ChainCosts Evaluator::with_gradients() const {
  if (in_backward()) return updating_costs(costs_.chain_costs, profile_);
  return accumulating_costs(costs_.chain_costs, profile_,
                            /*first=*/!gradients_allocated());
}

/// Returns the memory that is live during the whole micro-batch.
int64_t Evaluator::base_bytes() const {
  const int64_t gradients = gradients_allocated() ? fixed_.gradients : 0;
  return fixed_.total() - fixed_.gradients + gradients + costs_.data_bytes +
         cuda_graph_extra_bytes_;
}

int64_t Evaluator::update_peak_bytes() const {
  if (update_ == UpdateMode::kBackward) return base_bytes();
  const int64_t present = fixed_.total() + costs_.data_bytes;
  const ExchangeMemory& exchange = profile_.exchange;
  if (exchange.empty()) return present + profile_.update_bytes;
  const int64_t others = present - fixed_.gradients;
  // While the last buckets start, the first stage's parameters are still there.
  const int64_t last_start =
      exchange.change_at(1) + exchange.peak.front() +
      (profile_.gathers_parameters ? moved_at(0, /*backward=*/true) : 0);
  return std::max({present + std::max(last_start, exchange.end_peak),
                   others + exchange.sums + profile_.update_bytes,
                   others + exchange.gather});
}

int64_t Evaluator::prepare_peak_bytes() const {
  if (graph_) return base_bytes();  // beside the graph's memory
  return base_bytes() - costs_.data_bytes + costs_.prepare_bytes;
}

int64_t Evaluator::other_peak_bytes() const {
  return std::max(update_peak_bytes(), prepare_peak_bytes());
}

Plan Evaluator::plan_of(const Schedule& schedule, int64_t extra_bytes) const {
  const Simulation full = simulate(schedule, with_gradients());
  const Simulation last = simulate(
      schedule, profile_.moves_parameters()
                    ? accumulating_costs(last_costs_.chain_costs, profile_,
                                         /*first=*/false)
                    : last_costs_.chain_costs);
  const int min_graphs =
      update_ == UpdateMode::kBackward ? graphs_of_updates(profile_) : 1;
  Plan plan{.schedule = schedule};
  plan.global_batch = global_batch_;
  plan.micro_batch = costs_.micro_batch;
  plan.accumulate = accumulate_;
  plan.last_micro_batch = last_costs_.micro_batch;
  plan.precision = profile_.precision;
  plan.graph = graph_;
  plan.update = update_;
  plan.kept_bytes = full.kept_after_forward_bytes;
  plan.host_bytes = full.host_peak_bytes;
  plan.micro_ms = full.time_ms * time_factor(costs_, schedule, min_graphs) +
                  costs_.other_ms + (in_backward() ? update_ms() : 0);
  plan.step_ms = static_cast<double>(accumulate_ - 1) * plan.micro_ms +
                 last.time_ms * time_factor(last_costs_, schedule, min_graphs) +
                 last_costs_.other_ms + update_ms();
  const int64_t step_peak = base_bytes() + full.peak_bytes;
  const int64_t measured_peak = step_peak + extra_bytes;
  if (measured_peak >= other_peak_bytes()) {
    plan.peak_bytes = measured_peak;
    plan.extra_bytes = extra_bytes;
    plan.peak = report(schedule, full, step_peak);
    add_extra(plan.peak, extra_bytes);
  } else {
    plan.peak_bytes = other_peak_bytes();
    plan.peak = report(schedule, full, plan.peak_bytes);
  }
  return plan;
}

Plan Evaluator::measured(const Plan& plan, double micro_ms,
                         int64_t extra_bytes) const {
  Plan changed = plan_of(plan.schedule, extra_bytes);
  // Scale a smaller last micro-batch by the same ratio.
  const double ratio = micro_ms / changed.micro_ms;
  const double after_ms = in_backward() ? 0 : update_ms();
  changed.step_ms = (changed.step_ms - after_ms) * ratio + after_ms;
  changed.micro_ms = micro_ms;
  return changed;
}

PeakReport Evaluator::report(const Schedule& schedule,
                             const Simulation& simulation,
                             int64_t peak_bytes) const {
  PeakReport report;
  report.parameters = fixed_.parameters;
  report.optimizer = fixed_.optimizer;
  report.data = fixed_.data + costs_.data_bytes;
  report.gradients = in_backward() ? 0 : fixed_.gradients;
  report.workspace = fixed_.workspace;
  if (peak_bytes > base_bytes() + simulation.peak_bytes) {
    if (peak_bytes == update_peak_bytes()) {
      report.phase = "update";
      if (!in_backward()) report.workspace += profile_.update_bytes;
      return report;
    }
    report.phase = "preparation of a batch";
    report.gradients = gradients_allocated() ? fixed_.gradients : 0;
    report.data += graph_ ? cuda_graph_extra_bytes_
                          : costs_.prepare_bytes - costs_.data_bytes;
    return report;
  }
  if (graph_) {
    report.data += costs_.data_bytes;
    report.workspace += cuda_graph_extra_bytes_ - costs_.data_bytes;
  }
  const Op& op = schedule.ops().at(simulation.peak_op);
  const bool first_pass = simulation.peak_op < schedule.forward_ops();
  const bool back = op.kind == OpKind::kBackward || op.kind == OpKind::kFetch;
  report.phase = back ? "backward" : first_pass ? "forward" : "recompute";
  report.stage = op.stage;
  report.stage_name = profile_.stages.at(static_cast<size_t>(op.stage));
  report.kept_by_stage = simulation.at_peak.kept_by_stage;
  report.kept = sum(report.kept_by_stage);
  const int64_t moved =
      std::min(moved_at(op.stage, back), simulation.at_peak.workspace_bytes);
  report.parameters += moved;
  report.workspace += simulation.at_peak.workspace_bytes - moved;
  // Gradients of parameters that the backward has reached.
  int64_t parameters = 0;
  if (!first_pass) {
    int next = schedule.stages();  // stage after that of the next backward
    for (size_t i = 0; i < simulation.peak_op; ++i) {
      if (schedule.ops()[i].kind == OpKind::kBackward) {
        next = schedule.ops()[i].stage;
      }
    }
    if (next < schedule.stages()) {
      const auto stage = static_cast<size_t>(next);
      parameters = with_gradients().stages[stage].input_gradient_bytes -
                   costs_.chain_costs.stages[stage].input_gradient_bytes;
    }
  }
  report.gradients =
      parameters + (gradients_allocated() ? fixed_.gradients : 0);
  report.in_flight = simulation.at_peak.gradient_bytes - parameters;
  return report;
}

int64_t Evaluator::moved_at(int stage, bool backward) const {
  if (!profile_.moves_parameters()) return 0;
  const auto bytes_of = [&](int i) {
    return i >= 0 && i < static_cast<int>(profile_.moved_bytes.size())
               ? profile_.moved_bytes[static_cast<size_t>(i)]
               : 0;
  };
  const int64_t before = bytes_of(stage - 1);
  return bytes_of(stage) +
         (backward ? before : std::max(before, bytes_of(stage + 1)));
}

bool Evaluator::is_floor(const Plan& plan) const {
  if (plan.peak_bytes <= other_peak_bytes()) return true;
  if (!strategy_.empty()) return false;
  return plan.peak_bytes <=
         base_bytes() + solver().smallest_bytes() + plan.peak_bytes / 1000;
}

TimeBound Evaluator::bound_of(const Plan& plan) const {
  const auto ms_of = [&](const ChainCosts& chain_costs) {
    return simulate(plan.schedule, chain_costs).time_ms;
  };
  const double device = ms_of(without_launches(costs_.chain_costs));
  if (ms_of(without_launches(with_gradients())) > device * 1.01) {
    return TimeBound::kLink;
  }
  return ms_of(costs_.chain_costs) > device * 1.01 ? TimeBound::kHost
                                                   : TimeBound::kArithmetic;
}

std::optional<Plan> Evaluator::everything_kept(int64_t budget,
                                               int64_t extra_bytes) const {
  const int stages = static_cast<int>(profile_.stages.size());
  std::optional<Plan> best;
  for (const Schedule& schedule :
       {make_schedule("none", stages), keep_fastest(costs_.chain_costs)}) {
    // Tolerates sums in a different order.
    const double ms = simulate(schedule, costs_.chain_costs).time_ms;
    if (ms > min_stages_ms_ * (1 + 1e-9)) continue;
    Plan plan = plan_of(schedule, extra_bytes);
    if (plan.peak_bytes > budget) continue;
    if (!best || plan.peak_bytes < best->peak_bytes) {
      best.emplace(std::move(plan));
    }
  }
  return best;
}

std::optional<Plan> Evaluator::fastest(int64_t budget,
                                       int64_t extra_bytes) const {
  if (min_peak_bytes_ + std::min<int64_t>(extra_bytes, 0) > budget) {
    return std::nullopt;
  }
  if (!strategy_.empty()) {
    Plan plan = plan_of(of_strategy(strategy_).schedule, extra_bytes);
    if (plan.peak_bytes > budget) return std::nullopt;
    return plan;
  }
  if (auto plan = everything_kept(budget, extra_bytes)) return plan;
  const auto solution = solver().solve(budget - base_bytes() - extra_bytes);
  if (!solution) return std::nullopt;
  Plan plan = plan_of(solution->schedule, extra_bytes);
  if (plan.peak_bytes > budget)
    return std::nullopt;  // peak outside of the chain
  return plan;
}

Plan Evaluator::smallest() const {
  if (!strategy_.empty()) return of_strategy(strategy_);
  const auto solution = solver().solve(solver().smallest_bytes());
  TORCH_INTERNAL_ASSERT(solution.has_value());
  return plan_of(solution->schedule);
}

std::vector<Plan> Evaluator::frontier(int points) const {
  if (!strategy_.empty()) return {of_strategy(strategy_)};
  std::vector<Plan> plans;
  for (const auto& solution : solver().frontier(points)) {
    plans.push_back(plan_of(solution.schedule));
  }
  return plans;
}

Plan Evaluator::of_strategy(const std::string& strategy) const {
  return plan_of(
      make_schedule(strategy, static_cast<int>(profile_.stages.size())));
}

}  // namespace reprise::detail
