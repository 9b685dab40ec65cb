#include <reprise/plan/costs.h>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

namespace reprise {
namespace {

using nlohmann::json;
using Buffer = StageCosts::Buffer;

/// Every field once: `visit(name, field)`.
template <class Figures, class Visit>
void visit_kept(Figures& f, Visit&& visit) {
  visit("saved_inputs", f.saved_inputs);
  visit("saved_outputs", f.saved_outputs);
  visit("saved_bytes", f.saved_bytes);
  visit("host_bytes", f.host_bytes);
  visit("keep_extra_bytes", f.keep_extra_bytes);
  visit("backward_extra_bytes", f.backward_extra_bytes);
  visit("first_backward_extra_bytes", f.first_backward_extra_bytes);
  visit("forward_ms", f.forward_ms);
  visit("backward_ms", f.backward_ms);
  visit("forward_host_ms", f.forward_host_ms);
  visit("backward_host_ms", f.backward_host_ms);
}

template <class Figures, class Visit>
void visit_stage(Figures& f, Visit&& visit) {
  visit_kept(f, visit);
  visit("input_gradient_bytes", f.input_gradient_bytes);
  visit("drop_extra_bytes", f.drop_extra_bytes);
  visit("context_bytes", f.context_bytes);
}

/// The straight line through (x0, a) and (x1, b), at a place given as a share
/// of the way; never negative.
struct Line {
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
                             const std::vector<int64_t>& b, const Line& line) {
  std::vector<int64_t> result;
  for (size_t i = 0; i < a.size(); ++i) {
    result.push_back(line(a[i], b.at(i)));
  }
  return result;
}

void mix_kept(const KeptRunCosts& a, const KeptRunCosts& b, const Line& line,
              KeptRunCosts& result) {
  const auto mix = [&](auto KeptRunCosts::*field) {
    result.*field = line(a.*field, b.*field);
  };
  mix(&KeptRunCosts::saved_bytes);
  mix(&KeptRunCosts::host_bytes);
  mix(&KeptRunCosts::keep_extra_bytes);
  mix(&KeptRunCosts::backward_extra_bytes);
  mix(&KeptRunCosts::first_backward_extra_bytes);
  mix(&KeptRunCosts::forward_ms);
  mix(&KeptRunCosts::backward_ms);
  mix(&KeptRunCosts::forward_host_ms);
  mix(&KeptRunCosts::backward_host_ms);
}

/// `near` gives what has no size: which tensors are saved and shared.
StageCosts between(const StageCosts& a, const StageCosts& b,
                   const StageCosts& near, const Line& line) {
  StageCosts result = near;
  for (size_t i = 0; i < near.outputs.size(); ++i) {
    result.outputs[i].bytes =
        line(a.outputs.at(i).bytes, b.outputs.at(i).bytes);
  }
  mix_kept(a, b, line, result);
  for (size_t i = 0; i < near.variants.size(); ++i) {
    mix_kept(a.variants.at(i), b.variants.at(i), line, result.variants[i]);
  }
  result.input_gradient_bytes =
      line(a.input_gradient_bytes, b.input_gradient_bytes);
  result.drop_extra_bytes = line(a.drop_extra_bytes, b.drop_extra_bytes);
  // Buffers do not grow with the micro-batch.
  result.context_bytes = std::max(a.context_bytes, b.context_bytes);
  return result;
}

SizeCosts between(const SizeCosts& a, const SizeCosts& b, int64_t micro_batch) {
  const Line line{static_cast<double>(micro_batch - a.micro_batch) /
                  static_cast<double>(b.micro_batch - a.micro_batch)};
  const SizeCosts& near = line.share < 0.5 ? a : b;
  SizeCosts result;
  result.micro_batch = micro_batch;
  result.data_bytes = line(a.data_bytes, b.data_bytes);
  result.prepare_bytes = line(a.prepare_bytes, b.prepare_bytes);
  // Taken or not, whatever the size.
  result.workspace_bytes = std::max(a.workspace_bytes, b.workspace_bytes);
  result.graph_workspace_bytes =
      std::max(a.graph_workspace_bytes, b.graph_workspace_bytes);
  result.other_ms = line(a.other_ms, b.other_ms);
  // Not along the line: beyond the last size it could become anything.
  result.cut_factor = near.cut_factor;
  result.joined_factor = near.joined_factor;
  result.figures.input_bytes =
      between(a.figures.input_bytes, b.figures.input_bytes, line);
  result.figures.output_gradient_bytes =
      line(a.figures.output_gradient_bytes, b.figures.output_gradient_bytes);
  for (size_t i = 0; i < near.figures.stages.size(); ++i) {
    result.figures.stages.push_back(between(a.figures.stages.at(i),
                                            b.figures.stages.at(i),
                                            near.figures.stages[i], line));
  }
  return result;
}

/// No samples, no costs.
SizeCosts nothing_like(const SizeCosts& size) {
  SizeCosts nothing;
  nothing.figures.input_bytes.resize(size.figures.input_bytes.size());
  for (const StageCosts& stage : size.figures.stages) {
    StageCosts none = stage;
    const auto clear = [](const char*, auto& field) {
      if constexpr (std::is_arithmetic_v<std::decay_t<decltype(field)>>) {
        field = 0;
      }
    };
    for (Buffer& buffer : none.outputs) buffer.bytes = 0;
    visit_stage(none, clear);
    for (auto& variant : none.variants) visit_kept(variant, clear);
    nothing.figures.stages.push_back(none);
  }
  return nothing;
}

json to_value(const StageCosts& figures) {
  json value;
  for (const Buffer& buffer : figures.outputs) {
    value["outputs"].push_back({buffer.bytes, buffer.input});
  }
  visit_stage(figures, [&](const char* name, const auto& field) {
    value[name] = field;
  });
  value["variants"] = json::array();
  for (const auto& variant : figures.variants) {
    json& kept = value["variants"].emplace_back();
    visit_kept(variant, [&](const char* name, const auto& field) {
      kept[name] = field;
    });
  }
  return value;
}

StageCosts stage_from(const json& value) {
  StageCosts figures;
  for (const json& buffer : value.at("outputs")) {
    figures.outputs.push_back({buffer.at(0), buffer.at(1)});
  }
  visit_stage(figures, [&](const char* name, auto& field) {
    value.at(name).get_to(field);
  });
  for (const json& kept : value.at("variants")) {
    auto& variant = figures.variants.emplace_back();
    visit_kept(variant, [&](const char* name, auto& field) {
      kept.at(name).get_to(field);
    });
  }
  return figures;
}

json to_value(const SizeCosts& size) {
  json value = {{"micro_batch", size.micro_batch},
                {"data_bytes", size.data_bytes},
                {"prepare_bytes", size.prepare_bytes},
                {"workspace_bytes", size.workspace_bytes},
                {"graph_workspace_bytes", size.graph_workspace_bytes},
                {"other_ms", size.other_ms},
                {"cut_factor", size.cut_factor},
                {"joined_factor", size.joined_factor},
                {"input_bytes", size.figures.input_bytes},
                {"output_gradient_bytes", size.figures.output_gradient_bytes}};
  for (const StageCosts& stage : size.figures.stages) {
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
  value.at("cut_factor").get_to(size.cut_factor);
  value.at("joined_factor").get_to(size.joined_factor);
  value.at("input_bytes").get_to(size.figures.input_bytes);
  value.at("output_gradient_bytes").get_to(size.figures.output_gradient_bytes);
  for (const json& stage : value.at("stages")) {
    size.figures.stages.push_back(stage_from(stage));
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
  visit("parameters", p.fixed.parameters);
  visit("gradients", p.fixed.gradients);
  visit("optimizer", p.fixed.optimizer);
  visit("data", p.fixed.data);
  visit("workspace", p.fixed.workspace);
  visit("update_ms", p.update_ms);
  visit("update_bytes", p.update_bytes);
  visit("graph", p.graph);
}

}  // namespace

bool CostProfile::measured(int64_t micro_batch) const {
  return std::any_of(sizes.begin(), sizes.end(), [&](const SizeCosts& size) {
    return size.micro_batch == micro_batch;
  });
}

SizeCosts CostProfile::at(int64_t micro_batch) const {
  TORCH_CHECK(!sizes.empty() && micro_batch > 0,
              "[CostProfile::at] expected a size above 0 and something "
              "measured, got ",
              micro_batch, " and ", sizes.size(), " sizes");
  const auto after = std::lower_bound(
      sizes.begin(), sizes.end(), micro_batch,
      [](const SizeCosts& size, int64_t b) { return size.micro_batch < b; });
  if (after != sizes.end() && after->micro_batch == micro_batch) return *after;
  if (sizes.size() == 1) {
    return between(nothing_like(sizes[0]), sizes[0], micro_batch);
  }
  const auto last = std::max(after, sizes.begin() + 1);
  const auto second = last == sizes.end() ? last - 1 : last;
  return between(*(second - 1), *second, micro_batch);
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
                                             bool graph) const {
  for (const TriedSchedule& one : tried) {
    if (one.micro_batch == micro_batch && one.schedule == schedule &&
        one.graph == graph) {
      return &one;
    }
  }
  return nullptr;
}

std::optional<double> CostProfile::tried_ms(int64_t micro_batch,
                                            const std::string& schedule,
                                            bool graph) const {
  const TriedSchedule* found = find_tried(micro_batch, schedule, graph);
  if (found == nullptr) return std::nullopt;
  return found->ms;
}

void CostProfile::add(TriedSchedule one) {
  std::erase_if(tried, [&](const TriedSchedule& other) {
    return other.micro_batch == one.micro_batch &&
           other.schedule == one.schedule && other.graph == one.graph;
  });
  tried.push_back(std::move(one));
}

std::string to_json(const CostProfile& profile) {
  json value;
  visit_profile(profile, [&](const char* name, const auto& field) {
    value[name] = field;
  });
  value["sizes"] = json::array();
  for (const SizeCosts& size : profile.sizes) {
    value["sizes"].push_back(to_value(size));
  }
  value["tried"] = json::array();
  for (const TriedSchedule& one : profile.tried) {
    value["tried"].push_back({{"micro_batch", one.micro_batch},
                              {"schedule", one.schedule},
                              {"ms", one.ms},
                              {"graph", one.graph},
                              {"row", one.row}});
  }
  return value.dump();
}

CostProfile profile_from_json(std::string_view text) {
  CostProfile profile;
  try {
    const json value = json::parse(text);
    visit_profile(profile, [&](const char* name, auto& field) {
      value.at(name).get_to(field);
    });
    for (const json& size : value.at("sizes")) {
      profile.sizes.push_back(size_from(size));
    }
    // Not in profiles of versions that tried nothing.
    if (!value.contains("tried")) return profile;
    for (const json& one : value["tried"]) {
      profile.tried.push_back(
          {one.at("micro_batch").get<int64_t>(),
           one.at("schedule").get<std::string>(), one.at("ms").get<double>(),
           one.at("graph").get<bool>(), one.value("row", int64_t{0})});
    }
  } catch (const json::exception& error) {
    TORCH_CHECK(false,
                "[profile_from_json] not a cost profile: ", error.what());
  }
  return profile;
}

}  // namespace reprise
