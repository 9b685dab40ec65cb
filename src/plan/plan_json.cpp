#include "plan/plan_format.h"

#include <reprise/plan/planner.h>

#include <nlohmann/json.hpp>

namespace reprise {
namespace {

using nlohmann::ordered_json;

ordered_json plan_object(const Plan& plan) {
  const double seconds = plan.step_ms / 1000;
  ordered_json result;
  result["micro_batch"] = plan.micro_batch;
  result["accumulate"] = plan.accumulate;
  result["last_micro_batch"] = plan.last_micro_batch;
  result["global_batch"] = plan.global_batch;
  result["precision"] = plan.precision;
  result["recompute"] = plan.schedule.name();
  result["schedule"] = plan.schedule.to_text();
  if (!plan.weight_copies.empty()) {
    result["weight_copies"] = plan.weight_copies;
  }
  result["graph"] = plan.graph;
  result["runs_again"] = plan.schedule.total_runs() - plan.schedule.stages();
  result["predicted"] = {
      {"peak_bytes", plan.peak_bytes},
      {"kept_bytes", plan.kept_bytes},
      {"host_bytes", plan.host_bytes},
      {"step_ms", plan.step_ms},
      {"micro_ms", plan.micro_ms},
      {"samples_per_s",
       seconds > 0 ? static_cast<double>(plan.global_batch) / seconds : 0}};
  return result;
}

ordered_json memory_object(const PeakReport& peak) {
  return {
      {"parameters", peak.parameters}, {"gradients", peak.gradients},
      {"optimizer", peak.optimizer},   {"data", peak.data},
      {"activations", peak.kept},      {"gradients_in_flight", peak.in_flight},
      {"workspace", peak.workspace}};
}

ordered_json peak_object(const PeakReport& peak) {
  return {{"phase", peak.phase},
          {"stage", peak.stage},
          {"stage_name", peak.stage_name},
          {"kept_by_stage", peak.kept_by_stage},
          {"is_floor", peak.is_floor}};
}

ordered_json points_array(const std::vector<FrontierPoint>& points) {
  auto list = ordered_json::array();
  for (const FrontierPoint& point : points) {
    list.push_back({{"recompute", detail::recompute_text(point)},
                    {"micro_batch", point.micro_batch},
                    {"peak_bytes", point.peak_bytes},
                    {"step_ms", point.step_ms}});
  }
  return list;
}

ordered_json reductions_array(const std::vector<PeakReduction>& reductions) {
  auto list = ordered_json::array();
  for (const PeakReduction& reduction : reductions) {
    list.push_back(
        {{"what", reduction.what},
         {"peak_bytes", reduction.peak_bytes},
         {"step_ms", reduction.step_ms > 0 ? ordered_json(reduction.step_ms)
                                           : ordered_json(nullptr)}});
  }
  return list;
}

}  // namespace

std::string to_json(const Plan& plan) {
  return plan_object(plan).dump(2);
}

std::string to_json(const PlanResult& result,
                    const std::optional<PlanMeasurement>& measured) {
  ordered_json json;
  json["feasible"] = result.feasible;
  json["budget"] = result.request.memory > 0
                       ? ordered_json(result.request.memory)
                       : ordered_json(nullptr);
  json["smallest_bytes"] = result.smallest_bytes;
  json.update(plan_object(result.plan));
  json["memory"] = memory_object(result.plan.peak);
  json["peak_at"] = peak_object(result.plan.peak);
  if (measured) {
    json["measured"] = {{"peak_bytes", measured->peak_bytes},
                        {"step_ms", measured->step_ms},
                        {"step_ms_spread", measured->step_ms_spread}};
  }
  json["alternatives"] = ordered_json::array();
  for (const Plan& plan : result.alternatives) {
    json["alternatives"].push_back(plan_object(plan));
  }
  json["frontier"] = points_array(result.frontier);
  json["references"] = points_array(result.references);
  json["peak_reductions"] = reductions_array(result.peak_reductions);
  json["stages"] = result.stages;
  return json.dump(2);
}

}  // namespace reprise
