#include "base/json_text.h"
#include "base/text_check.h"
#include "plan/check_costs.h"

#include <reprise/base/error.h>
#include <reprise/plan/costs.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

namespace reprise {
namespace {

using nlohmann::json;
using Buffer = StageCosts::Buffer;

/// Calls `visit(name, field)` for every field.
template <class Costs, class Visit>
void visit_kept_run(Costs& f, Visit&& visit) {
  visit("saved_inputs", f.saved_inputs);
  visit("saved_outputs", f.saved_outputs);
  visit("saved_bytes", f.saved_bytes);
  visit("host_bytes", f.host_bytes);
  visit("keep_extra_bytes", f.keep_extra_bytes);
  visit("backward_extra_bytes", f.backward_extra_bytes);
  visit("first_backward_extra_bytes", f.first_backward_extra_bytes);
  visit("forward_ms", f.forward_ms);
  visit("backward_ms", f.backward_ms);
  visit("forward_launch_ms", f.forward_launch_ms);
  visit("backward_launch_ms", f.backward_launch_ms);
  visit("unused_output_ms", f.unused_output_ms);
}

template <class Costs, class Visit>
void visit_stage(Costs& f, Visit&& visit) {
  visit_kept_run(f, visit);
  visit("input_gradient_bytes", f.input_gradient_bytes);
  visit("drop_extra_bytes", f.drop_extra_bytes);
  visit("context_bytes", f.context_bytes);
}

/// Linear interpolation between a and b at the fraction `share` of the
/// distance. Results are never negative.
struct Interpolation {
  double share;

  double operator()(double a, double b) const {
    return std::max(0.0, a + (b - a) * share);
  }
  int64_t operator()(int64_t a, int64_t b) const {
    return std::llround(
        (*this)(static_cast<double>(a), static_cast<double>(b)));
  }
};

std::vector<int64_t> between(const std::vector<int64_t>& a,
                             const std::vector<int64_t>& b,
                             const Interpolation& interpolate) {
  std::vector<int64_t> result;
  for (size_t i = 0; i < a.size(); ++i) {
    result.push_back(interpolate(a[i], b.at(i)));
  }
  return result;
}

void interpolate_kept_run(const KeptRunCosts& a, const KeptRunCosts& b,
                          const Interpolation& interpolate,
                          KeptRunCosts& result) {
  const auto set = [&](auto KeptRunCosts::*field) {
    result.*field = interpolate(a.*field, b.*field);
  };
  set(&KeptRunCosts::saved_bytes);
  set(&KeptRunCosts::host_bytes);
  set(&KeptRunCosts::keep_extra_bytes);
  set(&KeptRunCosts::backward_extra_bytes);
  set(&KeptRunCosts::first_backward_extra_bytes);
  set(&KeptRunCosts::forward_ms);
  set(&KeptRunCosts::backward_ms);
  set(&KeptRunCosts::forward_launch_ms);
  set(&KeptRunCosts::backward_launch_ms);
  set(&KeptRunCosts::unused_output_ms);
}

/// Takes fields that are not numbers, such as which tensors are saved, from
/// `near`.
StageCosts between(const StageCosts& a, const StageCosts& b,
                   const StageCosts& near, const Interpolation& interpolate) {
  StageCosts result = near;
  for (size_t i = 0; i < near.outputs.size(); ++i) {
    result.outputs[i].bytes =
        interpolate(a.outputs.at(i).bytes, b.outputs.at(i).bytes);
  }
  interpolate_kept_run(a, b, interpolate, result);
  for (size_t i = 0; i < near.variants.size(); ++i) {
    interpolate_kept_run(a.variants.at(i), b.variants.at(i), interpolate,
                         result.variants[i]);
  }
  result.input_gradient_bytes =
      interpolate(a.input_gradient_bytes, b.input_gradient_bytes);
  result.drop_extra_bytes = interpolate(a.drop_extra_bytes, b.drop_extra_bytes);
  // Buffers do not grow with the micro-batch.
  result.context_bytes = std::max(a.context_bytes, b.context_bytes);
  return result;
}

SizeCosts between(const SizeCosts& a, const SizeCosts& b, int64_t micro_batch) {
  const Interpolation interpolate{
      static_cast<double>(micro_batch - a.micro_batch) /
      static_cast<double>(b.micro_batch - a.micro_batch)};
  const SizeCosts& near = interpolate.share < 0.5 ? a : b;
  SizeCosts result;
  result.micro_batch = micro_batch;
  result.data_bytes = interpolate(a.data_bytes, b.data_bytes);
  result.prepare_bytes = interpolate(a.prepare_bytes, b.prepare_bytes);
  // Workspaces do not depend on the size.
  result.workspace_bytes = std::max(a.workspace_bytes, b.workspace_bytes);
  result.graph_workspace_bytes =
      std::max(a.graph_workspace_bytes, b.graph_workspace_bytes);
  result.other_ms = interpolate(a.other_ms, b.other_ms);
  // Not interpolated: extrapolated factors could be arbitrarily wrong.
  result.separate_graphs_factor = near.separate_graphs_factor;
  result.single_graph_factor = near.single_graph_factor;
  result.chain_costs.input_bytes = between(
      a.chain_costs.input_bytes, b.chain_costs.input_bytes, interpolate);
  result.chain_costs.output_gradient_bytes = interpolate(
      a.chain_costs.output_gradient_bytes, b.chain_costs.output_gradient_bytes);
  for (size_t i = 0; i < near.chain_costs.stages.size(); ++i) {
    result.chain_costs.stages.push_back(
        between(a.chain_costs.stages.at(i), b.chain_costs.stages.at(i),
                near.chain_costs.stages[i], interpolate));
  }
  return result;
}

bool same_structure(const KeptRunCosts& a, const KeptRunCosts& b) {
  return a.saved_inputs == b.saved_inputs && a.saved_outputs == b.saved_outputs;
}

/// Whether the tensors of both sizes share memory in the same way. They need not:
/// `x.transpose(0, 1).contiguous()` is a view of x if x has one sample, and a
/// copy otherwise.
bool same_structure(const ChainCosts& a, const ChainCosts& b) {
  const auto same_stage = [](const StageCosts& x, const StageCosts& y) {
    const auto same_buffer = [](const Buffer& p, const Buffer& q) {
      return p.input == q.input;
    };
    return same_structure(x, y) &&
           std::equal(x.outputs.begin(), x.outputs.end(), y.outputs.begin(),
                      y.outputs.end(), same_buffer) &&
           std::equal(x.variants.begin(), x.variants.end(), y.variants.begin(),
                      y.variants.end(),
                      [](const KeptRunCosts& p, const KeptRunCosts& q) {
                        return same_structure(p, q);
                      });
  };
  return a.input_bytes.size() == b.input_bytes.size() &&
         std::equal(a.stages.begin(), a.stages.end(), b.stages.begin(),
                    b.stages.end(), same_stage);
}

/// Returns the costs of a micro-batch without samples, which are zero.
SizeCosts zero_costs_like(const SizeCosts& size) {
  SizeCosts zero;
  zero.chain_costs.input_bytes.resize(size.chain_costs.input_bytes.size());
  for (const StageCosts& stage : size.chain_costs.stages) {
    StageCosts none = stage;
    const auto clear = [](const char*, auto& field) {
      if constexpr (std::is_arithmetic_v<std::decay_t<decltype(field)>>) {
        field = 0;
      }
    };
    for (Buffer& buffer : none.outputs) buffer.bytes = 0;
    visit_stage(none, clear);
    for (auto& variant : none.variants) visit_kept_run(variant, clear);
    zero.chain_costs.stages.push_back(none);
  }
  return zero;
}

json to_value(const StageCosts& costs) {
  json value;
  for (const Buffer& buffer : costs.outputs) {
    value["outputs"].push_back({buffer.bytes, buffer.input});
  }
  visit_stage(
      costs, [&](const char* name, const auto& field) { value[name] = field; });
  value["variants"] = json::array();
  for (const auto& variant : costs.variants) {
    json& kept = value["variants"].emplace_back();
    visit_kept_run(variant, [&](const char* name, const auto& field) {
      kept[name] = field;
    });
  }
  return value;
}

StageCosts stage_from(const json& value) {
  StageCosts costs;
  for (const json& buffer : value.at("outputs")) {
    costs.outputs.push_back({buffer.at(0), buffer.at(1)});
  }
  visit_stage(costs, [&](const char* name, auto& field) {
    value.at(name).get_to(field);
  });
  for (const json& kept : value.at("variants")) {
    auto& variant = costs.variants.emplace_back();
    visit_kept_run(variant, [&](const char* name, auto& field) {
      kept.at(name).get_to(field);
    });
  }
  return costs;
}

json to_value(const SizeCosts& size) {
  json value = {
      {"micro_batch", size.micro_batch},
      {"data_bytes", size.data_bytes},
      {"prepare_bytes", size.prepare_bytes},
      {"workspace_bytes", size.workspace_bytes},
      {"graph_workspace_bytes", size.graph_workspace_bytes},
      {"other_ms", size.other_ms},
      {"separate_graphs_factor", size.separate_graphs_factor},
      {"single_graph_factor", size.single_graph_factor},
      {"input_bytes", size.chain_costs.input_bytes},
      {"output_gradient_bytes", size.chain_costs.output_gradient_bytes}};
  for (const StageCosts& stage : size.chain_costs.stages) {
    value["stages"].push_back(to_value(stage));
  }
  return value;
}

SizeCosts size_from(const json& value) {
  SizeCosts size;
  value.at("micro_batch").get_to(size.micro_batch);
  value.at("data_bytes").get_to(size.data_bytes);
  value.at("prepare_bytes").get_to(size.prepare_bytes);
  value.at("workspace_bytes").get_to(size.workspace_bytes);
  value.at("graph_workspace_bytes").get_to(size.graph_workspace_bytes);
  value.at("other_ms").get_to(size.other_ms);
  value.at("separate_graphs_factor").get_to(size.separate_graphs_factor);
  value.at("single_graph_factor").get_to(size.single_graph_factor);
  value.at("input_bytes").get_to(size.chain_costs.input_bytes);
  value.at("output_gradient_bytes")
      .get_to(size.chain_costs.output_gradient_bytes);
  for (const json& stage : value.at("stages")) {
    size.chain_costs.stages.push_back(stage_from(stage));
  }
  return size;
}

template <class Profile, class Visit>
void visit_profile(Profile& p, Visit&& visit) {
  visit("key", p.key);
  visit("precision", p.precision);
  visit("stages", p.stages);
  visit("gradient_bytes", p.gradient_bytes);
  visit("held_twice_bytes", p.held_twice_bytes);
  visit("final_gradient_bytes", p.final_gradient_bytes);
  visit("stage_update_bytes", p.stage_update_bytes);
  visit("parameters", p.fixed.parameters);
  visit("gradients", p.fixed.gradients);
  visit("optimizer", p.fixed.optimizer);
  visit("data", p.fixed.data);
  visit("workspace", p.fixed.workspace);
  visit("update_ms", p.update_ms);
  visit("backward_update_ms", p.backward_update_ms);
  visit("update_bytes", p.update_bytes);
  visit("graph", p.graph);
  visit("captures_update", p.captures_update);
  visit("host_state_bytes", p.host_state_bytes);
  visit("moved_bytes", p.moved_bytes);
  visit("moved_gradient_bytes", p.moved_gradient_bytes);
  visit("to_device_bytes_per_ms", p.to_device_bytes_per_ms);
  visit("half_gradients", p.half_gradients);
  visit("stage_parameter_bytes", p.stage_parameter_bytes);
  visit("stage_wire_bytes", p.stage_wire_bytes);
  visit("gathers_parameters", p.gathers_parameters);
  visit("gather_delay_ms", p.gather_delay_ms);
  visit("to_host_bytes_per_ms", p.to_host_bytes_per_ms);
}

}  // namespace

bool CostProfile::measured(int64_t micro_batch) const {
  return std::any_of(sizes.begin(), sizes.end(), [&](const SizeCosts& size) {
    return size.micro_batch == micro_batch;
  });
}

SizeCosts CostProfile::at(int64_t micro_batch) const {
  TORCH_CHECK(!sizes.empty() && micro_batch > 0,
              "[CostProfile::at] expected a positive size and at least one "
              "measured size, got ",
              micro_batch, " and ", sizes.size(), " measured sizes");
  const auto after = std::lower_bound(
      sizes.begin(), sizes.end(), micro_batch,
      [](const SizeCosts& size, int64_t b) { return size.micro_batch < b; });
  if (after != sizes.end() && after->micro_batch == micro_batch) return *after;
  if (sizes.size() == 1) {
    return between(zero_costs_like(sizes[0]), sizes[0], micro_batch);
  }
  const auto last = std::max(after, sizes.begin() + 1);
  const auto second = last == sizes.end() ? last - 1 : last;
  const auto first = second - 1;
  if (!same_structure(first->chain_costs, second->chain_costs)) {
    // Scale the costs of the larger size: a smaller one is the exception.
    const SizeCosts& scaled =
        micro_batch < first->micro_batch ? *first : *second;
    return between(zero_costs_like(scaled), scaled, micro_batch);
  }
  return between(*first, *second, micro_batch);
}

void CostProfile::add(SizeCosts costs) {
  const auto place = std::lower_bound(
      sizes.begin(), sizes.end(), costs.micro_batch,
      [](const SizeCosts& size, int64_t b) { return size.micro_batch < b; });
  if (place != sizes.end() && place->micro_batch == costs.micro_batch) {
    *place = std::move(costs);
  } else {
    sizes.insert(place, std::move(costs));
  }
}

const TriedSchedule* CostProfile::find_tried(int64_t micro_batch,
                                             const std::string& schedule,
                                             bool graph,
                                             UpdateMode update) const {
  for (const TriedSchedule& timing : tried) {
    if (timing.micro_batch == micro_batch && timing.schedule == schedule &&
        timing.graph == graph && timing.update == update) {
      return &timing;
    }
  }
  return nullptr;
}

std::optional<double> CostProfile::tried_ms(int64_t micro_batch,
                                            const std::string& schedule,
                                            bool graph,
                                            UpdateMode update) const {
  const TriedSchedule* found = find_tried(micro_batch, schedule, graph, update);
  if (found == nullptr) return std::nullopt;
  return found->ms;
}

void CostProfile::add(TriedSchedule timing) {
  std::erase_if(tried, [&](const TriedSchedule& other) {
    return other.micro_batch == timing.micro_batch &&
           other.schedule == timing.schedule && other.graph == timing.graph &&
           other.update == timing.update;
  });
  tried.push_back(std::move(timing));
}

std::string to_json(const CostProfile& profile) {
  json value;
  visit_profile(profile, [&](const char* name, const auto& field) {
    if constexpr (NamedEnum<std::decay_t<decltype(field)>>) {
      value[name] = to_text(field);
    } else {
      value[name] = field;
    }
  });
  value["sizes"] = json::array();
  for (const SizeCosts& size : profile.sizes) {
    value["sizes"].push_back(to_value(size));
  }
  value["tried"] = json::array();
  for (const TriedSchedule& timing : profile.tried) {
    value["tried"].push_back({{"micro_batch", timing.micro_batch},
                              {"schedule", timing.schedule},
                              {"ms", timing.ms},
                              {"graph", timing.graph},
                              {"comparison", timing.comparison},
                              {"update", to_text(timing.update)},
                              {"extra_bytes", timing.extra_bytes}});
  }
  return value.dump();
}

CostProfile profile_from_json(std::string_view text) {
  CostProfile profile;
  try {
    const std::string limit = why_not_parsed(text);
    if (!limit.empty()) throw Error(limit);
    const json value = json::parse(text);
    visit_profile(profile, [&](const char* name, auto& field) {
      using Field = std::decay_t<decltype(field)>;
      if constexpr (NamedEnum<Field>) {
        field = from_text<Field>(value.at(name).get<std::string>());
      } else {
        value.at(name).get_to(field);
      }
    });
    for (const json& size : value.at("sizes")) {
      profile.sizes.push_back(size_from(size));
    }
    // Profiles of earlier versions have no timings.
    for (const json& timing : value.value("tried", json::array())) {
      profile.tried.push_back({timing.at("micro_batch").get<int64_t>(),
                               timing.at("schedule").get<std::string>(),
                               timing.at("ms").get<double>(),
                               timing.at("graph").get<bool>(),
                               timing.value("comparison", int64_t{0}),
                               from_text<UpdateMode>(timing.value(
                                   "update", to_text(UpdateMode::kAfter))),
                               timing.value("extra_bytes", int64_t{0})});
    }
  } catch (const std::exception& error) {  // of the parser, or of a name in it
    TORCH_CHECK(false, "[profile_from_json] not a cost profile: ",
                shortened(error.what()));
  }
  const std::string problem = detail::why_not_usable(profile);
  TORCH_CHECK(problem.empty(),
              "[profile_from_json] not a cost profile: ", shortened(problem));
  return profile;
}

}  // namespace reprise
