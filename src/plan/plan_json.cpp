#include "base/json_text.h"
#include "base/text_check.h"
#include "plan/plan_format.h"

#include <reprise/base/error.h>
#include <reprise/plan/planner.h>

#include <c10/util/Exception.h>

namespace reprise {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

ordered_json plan_object(const Plan& plan) {
  const double seconds = plan.step_ms / 1000;
  ordered_json result;
  result["micro_batch"] = plan.micro_batch;
  result["accumulate"] = plan.accumulate;
  result["last_micro_batch"] = plan.last_micro_batch;
  result["global_batch"] = plan.global_batch;
  result["precision"] = to_text(plan.precision);
  result["recompute"] = plan.schedule.name();
  result["schedule"] = plan.schedule.to_text();
  if (plan.weight_copies) {
    result["weight_copies"] = to_text(*plan.weight_copies);
  }
  if (plan.settings) {
    result["layout"] = to_text(plan.settings->layout);
    result["autotune"] = to_text(plan.settings->autotune);
  }
  result["graph"] = plan.graph;
  result["update"] = to_text(plan.update);
  result["state"] = to_text(plan.state);
  if (plan.host_share < 1) result["host_share"] = plan.host_share;
  result["runs_again"] = plan.schedule.total_runs() - plan.schedule.stages();
  result["predicted"] = {
      {"peak_bytes", plan.peak_bytes},
      {"kept_bytes", plan.kept_bytes},
      {"host_bytes", plan.host_bytes},
      {"host_state",
       {{"parameters", plan.host_state.parameters},
        {"gradients", plan.host_state.gradients},
        {"optimizer", plan.host_state.optimizer}}},
      {"step_ms", plan.step_ms},
      {"micro_ms", plan.micro_ms},
      {"extra_bytes", plan.extra_bytes},
      {"bound", to_text(plan.bound)},
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

PeakReport peak_from(const json& memory, const json& at) {
  PeakReport peak;
  memory.at("parameters").get_to(peak.parameters);
  memory.at("gradients").get_to(peak.gradients);
  memory.at("optimizer").get_to(peak.optimizer);
  memory.at("data").get_to(peak.data);
  memory.at("activations").get_to(peak.kept);
  memory.at("gradients_in_flight").get_to(peak.in_flight);
  memory.at("workspace").get_to(peak.workspace);
  at.at("phase").get_to(peak.phase);
  at.at("stage").get_to(peak.stage);
  at.at("stage_name").get_to(peak.stage_name);
  at.at("kept_by_stage").get_to(peak.kept_by_stage);
  at.at("is_floor").get_to(peak.is_floor);
  return peak;
}

void check_sizes(const Plan& plan, int stages) {
  constexpr int64_t kMost = 1'000'000'000;
  const auto positive = [](int64_t size) { return size >= 1 && size <= kMost; };
  if (!positive(plan.micro_batch) || !positive(plan.accumulate) ||
      plan.global_batch < 0 || plan.global_batch > kMost ||
      plan.last_micro_batch < 0 || plan.last_micro_batch > plan.micro_batch) {
    throw Error("sizes of batches that are no such sizes");
  }
  if (plan.peak.stage < -1 || plan.peak.stage >= stages ||
      plan.peak.kept_by_stage.size() > static_cast<size_t>(stages)) {
    throw Error("a peak in a stage that does not exist");
  }
}

Plan plan_from(const json& object, int stages) {
  Plan plan{.schedule =
                Schedule::parse(object.at("recompute"), stages,
                                object.at("schedule").get<std::string>())};
  object.at("micro_batch").get_to(plan.micro_batch);
  object.at("accumulate").get_to(plan.accumulate);
  object.at("last_micro_batch").get_to(plan.last_micro_batch);
  object.at("global_batch").get_to(plan.global_batch);
  plan.precision =
      from_text<Precision>(object.at("precision").get<std::string>());
  if (object.contains("weight_copies")) {
    plan.weight_copies = from_text<WeightCopiesMode>(
        object.at("weight_copies").get<std::string>());
  }
  if (object.contains("layout")) {
    plan.settings = {
        from_text<ImageLayout>(object.at("layout").get<std::string>()),
        from_text<Autotune>(object.at("autotune").get<std::string>())};
  }
  object.at("graph").get_to(plan.graph);
  if (object.contains("update")) {
    plan.update = from_text<UpdateMode>(object.at("update").get<std::string>());
  }
  const json& predicted = object.at("predicted");
  if (object.contains("state")) {
    plan.state = from_text<StatePlace>(object.at("state").get<std::string>());
    plan.host_share = object.value("host_share", 1.0);
    const json& host = predicted.at("host_state");
    host.at("parameters").get_to(plan.host_state.parameters);
    host.at("gradients").get_to(plan.host_state.gradients);
    host.at("optimizer").get_to(plan.host_state.optimizer);
    plan.bound = from_text<TimeBound>(predicted.at("bound").get<std::string>());
  }
  predicted.at("peak_bytes").get_to(plan.peak_bytes);
  predicted.at("kept_bytes").get_to(plan.kept_bytes);
  predicted.at("host_bytes").get_to(plan.host_bytes);
  predicted.at("step_ms").get_to(plan.step_ms);
  predicted.at("micro_ms").get_to(plan.micro_ms);
  plan.extra_bytes = predicted.value("extra_bytes", int64_t{0});
  plan.peak = peak_from(object.at("memory"), object.at("peak_at"));
  check_sizes(plan, stages);
  return plan;
}

/// The plan with the memory at its peak.
ordered_json whole_plan_object(const Plan& plan) {
  ordered_json object = plan_object(plan);
  object["memory"] = memory_object(plan.peak);
  object["peak_at"] = peak_object(plan.peak);
  return object;
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
  return whole_plan_object(plan).dump(2);
}

Plan plan_from_json(const std::string& text, int stages) {
  try {
    const std::string limit = why_not_parsed(text);
    if (!limit.empty()) throw Error(limit);
    return plan_from(json::parse(text), stages);
  } catch (const std::exception& error) {  // of the parser, or of a name in it
    TORCH_CHECK(false,
                "[plan] expected a plan as JSON: ", shortened(error.what()));
  }
}

std::string to_json(const PlanResult& result,
                    const std::optional<PlanMeasurement>& measured) {
  ordered_json object;
  object["feasible"] = result.feasible;
  object["budget"] = result.request.memory > 0
                         ? ordered_json(result.request.memory)
                         : ordered_json(nullptr);
  object["smallest_bytes"] = result.smallest_bytes;
  object.update(whole_plan_object(result.plan));
  if (measured) {
    object["measured"] = {{"peak_bytes", measured->peak_bytes},
                          {"step_ms", measured->step_ms},
                          {"step_ms_spread", measured->step_ms_spread}};
  }
  object["alternatives"] = ordered_json::array();
  for (const Plan& plan : result.alternatives) {
    object["alternatives"].push_back(plan_object(plan));
  }
  object["frontier"] = points_array(result.frontier);
  object["references"] = points_array(result.references);
  object["peak_reductions"] = reductions_array(result.peak_reductions);
  object["stages"] = result.stages;
  return object.dump(2);
}

}  // namespace reprise
