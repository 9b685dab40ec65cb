#include "evaluation.h"

#include <reprise/recompute/execution.h>
#include <reprise/recompute/strategy.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace reprise::plan_detail {
namespace {

int64_t sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

/// Of a schedule that cuts the chain into more than one graph, but not at every
/// stage, a share.
double factor_of(const SizeCosts& costs, const Schedule& schedule) {
  const int most = schedule.stages() - 1;
  const double share =
      most > 0 ? static_cast<double>(graph_count(schedule) - 1) / most : 0.0;
  return costs.joined_factor + (costs.cut_factor - costs.joined_factor) * share;
}

/// Gradients of parameters that come into being during the backward: of a window's
/// first micro-batch all of them; of the others those of tied weights, which are
/// added up apart where the chain is cut into several graphs. They join the
/// gradient in flight, which like them depends only on how far the backward has
/// come.
ChainFigures add_gradients(ChainFigures figures,
                           const std::vector<int64_t>& added, bool first) {
  int64_t so_far = 0;
  for (size_t i = figures.stages.size(); i-- > 0;) {
    StageFigures& stage = figures.stages[i];
    so_far += added.at(i);
    stage.input_gradient_bytes += so_far;
    if (!first) continue;
    const auto more = [](KeptRunFigures& run) {
      run.backward_extra_bytes =
          std::max(run.backward_extra_bytes, run.first_backward_extra_bytes);
    };
    more(stage);
    for (auto& variant : stage.variants) more(variant);
  }
  return figures;
}

}  // namespace

int64_t micro_batch_peak(const CostProfile& profile, const SizeCosts& size,
                         const Schedule& schedule, bool first) {
  const ChainFigures figures = add_gradients(
      size.figures, first ? profile.gradient_bytes : profile.tied_bytes, first);
  return profile.fixed.total() - (first ? profile.fixed.gradients : 0) +
         size.data_bytes + simulate(schedule, figures).peak_bytes;
}

int64_t beside_graph(const CostProfile& profile, const SizeCosts& size) {
  return size.data_bytes + profile.update_bytes;
}

Evaluator::Evaluator(const CostProfile& profile, int64_t micro_batch,
                     int64_t global_batch, std::string strategy, bool graph)
    : precision_(profile.precision),
      stages_(profile.stages),
      gradient_bytes_(profile.gradient_bytes),
      tied_bytes_(profile.tied_bytes),
      fixed_(profile.fixed),
      update_ms_(profile.update_ms),
      update_bytes_(profile.update_bytes),
      graph_(graph),
      global_batch_(global_batch),
      costs_(profile.at(micro_batch)),
      accumulate_((global_batch + micro_batch - 1) / micro_batch),
      beside_graph_(graph ? beside_graph(profile, costs_) : 0),
      strategy_(std::move(strategy)) {
  const int64_t last = global_batch - (accumulate_ - 1) * micro_batch;
  last_costs_ = last == micro_batch ? costs_ : profile.at(last);
  if (strategy_.empty()) {
    solver_.emplace(with_gradients());
  }
}

ChainFigures Evaluator::with_gradients() const {
  const bool first = !gradients_stand();
  return add_gradients(costs_.figures, first ? gradient_bytes_ : tied_bytes_,
                       first);
}

/// There during the whole micro-batch.
int64_t Evaluator::base_bytes() const {
  const int64_t gradients = gradients_stand() ? fixed_.gradients : 0;
  return fixed_.total() - fixed_.gradients + gradients + costs_.data_bytes +
         beside_graph_;
}

Plan Evaluator::plan_of(const Schedule& schedule) const {
  const Simulation full = simulate(schedule, with_gradients());
  const Simulation last = simulate(schedule, last_costs_.figures);
  Plan plan{.schedule = schedule};
  plan.global_batch = global_batch_;
  plan.micro_batch = costs_.micro_batch;
  plan.accumulate = accumulate_;
  plan.last_micro_batch = last_costs_.micro_batch;
  plan.precision = precision_;
  plan.graph = graph_;
  plan.kept_bytes = full.kept_after_forward_bytes;
  plan.host_bytes = full.host_peak_bytes;
  plan.micro_ms = full.time_ms * factor_of(costs_, schedule) + costs_.other_ms;
  plan.step_ms = static_cast<double>(accumulate_ - 1) * plan.micro_ms +
                 last.time_ms * factor_of(last_costs_, schedule) +
                 last_costs_.other_ms + update_ms_;
  const int64_t step_peak = base_bytes() + full.peak_bytes;
  const int64_t update_peak =
      fixed_.total() + costs_.data_bytes + update_bytes_;
  plan.peak_bytes = std::max(step_peak, update_peak);
  plan.peak = report(schedule, full, plan.peak_bytes, update_peak > step_peak);
  return plan;
}

Plan Evaluator::with_time(Plan plan, double micro_ms) const {
  // A smaller last one is off by as much.
  const double ratio = micro_ms / plan.micro_ms;
  plan.step_ms = (plan.step_ms - update_ms_) * ratio + update_ms_;
  plan.micro_ms = micro_ms;
  return plan;
}

PeakReport Evaluator::report(const Schedule& schedule,
                             const Simulation& simulation, int64_t peak_bytes,
                             bool in_update) const {
  PeakReport report;
  report.parameters = fixed_.parameters;
  report.optimizer = fixed_.optimizer;
  report.data = fixed_.data + costs_.data_bytes;
  report.gradients = fixed_.gradients;
  report.workspace = fixed_.workspace;
  if (in_update) {
    report.phase = "update";
    report.workspace += update_bytes_;
    report.is_floor = true;
    return report;
  }
  if (graph_) {
    report.data += costs_.data_bytes;
    report.workspace += update_bytes_;
  }
  const Op& op = schedule.ops().at(simulation.peak_op);
  const bool first_pass = simulation.peak_op < schedule.forward_ops();
  const bool back = op.kind == OpKind::kBackward || op.kind == OpKind::kFetch;
  report.phase = back ? "backward" : first_pass ? "forward" : "recompute";
  report.stage = op.stage;
  report.stage_name = stages_.at(static_cast<size_t>(op.stage));
  report.kept_by_stage = simulation.at_peak.kept_by_stage;
  report.kept = sum(report.kept_by_stage);
  report.workspace += simulation.at_peak.workspace_bytes;
  // Of parameters, as far as the backward has come.
  int64_t parameters = 0;
  if (!first_pass) {
    int next = schedule.stages();  // the stage behind the next backward's
    for (size_t i = 0; i < simulation.peak_op; ++i) {
      if (schedule.ops()[i].kind == OpKind::kBackward) {
        next = schedule.ops()[i].stage;
      }
    }
    const auto& added = gradients_stand() ? tied_bytes_ : gradient_bytes_;
    for (size_t i = static_cast<size_t>(next); i < added.size(); ++i) {
      parameters += added[i];
    }
  }
  report.gradients = parameters + (gradients_stand() ? fixed_.gradients : 0);
  report.in_flight = simulation.at_peak.gradient_bytes - parameters;
  report.is_floor = solver_ && peak_bytes <= base_bytes() +
                                                 solver_->smallest_bytes() +
                                                 peak_bytes / 1000;
  return report;
}

std::optional<Plan> Evaluator::fastest(int64_t budget) const {
  if (!solver_) {
    Plan plan = of_strategy(strategy_);
    if (plan.peak_bytes > budget) return std::nullopt;
    return plan;
  }
  const auto solution = solver_->solve(budget - base_bytes());
  if (!solution) return std::nullopt;
  Plan plan = plan_of(solution->schedule);
  if (plan.peak_bytes > budget) return std::nullopt;  // the update's
  return plan;
}

Plan Evaluator::smallest() const {
  if (!solver_) return of_strategy(strategy_);
  const auto solution = solver_->solve(solver_->smallest_bytes());
  TORCH_INTERNAL_ASSERT(solution.has_value());
  return plan_of(solution->schedule);
}

std::vector<Plan> Evaluator::frontier(int points) const {
  if (!solver_) return {of_strategy(strategy_)};
  std::vector<Plan> plans;
  for (const auto& solution : solver_->frontier(points)) {
    plans.push_back(plan_of(solution.schedule));
  }
  return plans;
}

Plan Evaluator::of_strategy(const std::string& strategy) const {
  return plan_of(make_schedule(strategy, static_cast<int>(stages_.size())));
}

}  // namespace reprise::plan_detail
