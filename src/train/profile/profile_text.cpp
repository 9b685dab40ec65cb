// Tested by tests/train/profile/profile_test.cpp.
#include "plan/drawing.h"

#include <reprise/base/bytes.h>
#include <reprise/train/profile.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <string_view>

namespace reprise {
namespace {

using Phase = TrainingProfile::Phase;
using ProfiledStage = TrainingProfile::Stage;

constexpr Category kProfiledCategories[] = {
    Category::kParameters,  Category::kGradients, Category::kOptimizer,
    Category::kActivations, Category::kWorkspace, Category::kData};

/// Returns the sums over all stages, but the maximum for temporary memory.
ProfiledStage total_of(const std::vector<ProfiledStage>& stages) {
  ProfiledStage total;
  total.name = "together";
  for (const ProfiledStage& stage : stages) {
    total.output_bytes += stage.output_bytes;
    total.kept_bytes += stage.kept_bytes;
    total.forward_extra_bytes =
        std::max(total.forward_extra_bytes, stage.forward_extra_bytes);
    total.backward_extra_bytes =
        std::max(total.backward_extra_bytes, stage.backward_extra_bytes);
    total.forward_ms += stage.forward_ms;
    total.backward_ms += stage.backward_ms;
  }
  return total;
}

std::string signed_bytes(int64_t bytes) {
  return fmt::format("{}{}", bytes > 0 ? "+" : "", format_bytes(bytes));
}

std::string phases_table(const TrainingProfile& profile) {
  std::string text =
      fmt::format("\n{:<22}{:>12}{:>13}{:>12}{:>12}{:>12}\n", "phase", "before",
                  "change", "after", "peak", "time");
  for (const Phase& phase : profile.phases) {
    text += fmt::format(
        "{:<22}{:>12}{:>13}{:>12}{:>12}{:>12}\n", phase.name,
        format_bytes(phase.before_bytes), signed_bytes(phase.increment_bytes()),
        format_bytes(phase.after_bytes), format_bytes(phase.peak_bytes),
        detail::format_ms(phase.ms));
  }
  return text;
}

std::string step_line(const TrainingProfile& profile) {
  const bool on = try_from_text<GraphMode>(profile.graph) == GraphMode::kOn;
  constexpr std::string_view kReason = "off: ";
  std::string graph;
  if (on) {
    graph = " with a CUDA graph";
  } else if (profile.graph.starts_with(kReason)) {
    graph = fmt::format(" without a CUDA graph ({})",
                        profile.graph.substr(kReason.size()));
  }
  return fmt::format(
      "step: train takes {} per window{}; the phases, measured {}, add up to "
      "{}\n",
      detail::format_ms(profile.step_ms), graph,
      on ? "without the graph" : "one by one",
      detail::format_ms(profile.phases_ms()));
}

std::string stage_row(const std::string& number, const ProfiledStage& stage) {
  return fmt::format(
      "{:>4}  {:<24}{:>11}{:>11}{:>11}{:>11}{:>11}{:>11}\n", number,
      detail::shorten(stage.name, 23), format_bytes(stage.output_bytes),
      format_bytes(stage.kept_bytes), format_bytes(stage.forward_extra_bytes),
      format_bytes(stage.backward_extra_bytes),
      detail::format_ms(stage.forward_ms),
      detail::format_ms(stage.backward_ms));
}

std::string stages_table(const TrainingProfile& profile) {
  std::string text = fmt::format(
      "\n{:>4}  {:<24}{:>11}{:>11}{:>11}{:>11}{:>11}{:>11}\n", "", "stage",
      "output", "kept", "+forward", "+backward", "forward", "backward");
  for (size_t i = 0; i < profile.stages.size(); ++i) {
    text += stage_row(std::to_string(i), profile.stages[i]);
  }
  return text + stage_row("", total_of(profile.stages)) +
         "+forward, +backward: temporaries beyond what stays; together, the "
         "largest\n";
}

nlohmann::ordered_json stage_object(const ProfiledStage& stage) {
  return {{"name", stage.name},
          {"output_bytes", stage.output_bytes},
          {"kept_bytes", stage.kept_bytes},
          {"forward_extra_bytes", stage.forward_extra_bytes},
          {"backward_extra_bytes", stage.backward_extra_bytes},
          {"forward_ms", stage.forward_ms},
          {"backward_ms", stage.backward_ms}};
}

nlohmann::ordered_json phase_object(const Phase& phase) {
  return {{"name", phase.name},
          {"before_bytes", phase.before_bytes},
          {"increment_bytes", phase.increment_bytes()},
          {"after_bytes", phase.after_bytes},
          {"peak_bytes", phase.peak_bytes},
          {"ms", phase.ms}};
}

}  // namespace

std::string to_text(const TrainingProfile& profile) {
  std::string text = fmt::format(
      "{}, {:.1f} M parameters, {} × {} of {} on {}, {}, {}, recompute {}\n",
      profile.model, static_cast<double>(profile.parameters) / 1e6,
      profile.micro_batch, profile.accumulate, profile.data, profile.device,
      profile.precision, profile.optimizer, profile.recompute);
  text += phases_table(profile);
  if (profile.dataset_bytes > 0) {
    text +=
        fmt::format("data: the dataset, {}, is counted in that phase only\n",
                    format_bytes(profile.dataset_bytes));
  }
  text += step_line(profile);
  text += stages_table(profile);
  text += fmt::format(
      "\nThe peak of a window, {}, is in the {}{}\n",
      format_bytes(profile.peak_bytes), profile.peak_phase,
      profile.peak_stage.empty()
          ? std::string()
          : fmt::format(" of '{}'", detail::shorten(profile.peak_stage, 40)));
  std::vector<detail::StackPart> parts;
  for (const Category category : kProfiledCategories) {
    parts.push_back({to_text(category), profile.memory[category]});
  }
  return text + detail::draw_stack(parts, /*limit=*/0);
}

std::string to_json(const TrainingProfile& profile) {
  nlohmann::ordered_json result = {{"model", profile.model},
                                   {"parameters", profile.parameters},
                                   {"data", profile.data},
                                   {"device", profile.device},
                                   {"precision", profile.precision},
                                   {"optimizer", profile.optimizer},
                                   {"recompute", profile.recompute},
                                   {"micro_batch", profile.micro_batch},
                                   {"accumulate", profile.accumulate}};
  result["phases"] = nlohmann::ordered_json::array();
  for (const Phase& phase : profile.phases) {
    result["phases"].push_back(phase_object(phase));
  }
  result["phases_ms"] = profile.phases_ms();
  result["step_ms"] = profile.step_ms;
  result["graph"] = profile.graph;
  result["stages"] = nlohmann::ordered_json::array();
  for (const ProfiledStage& stage : profile.stages) {
    result["stages"].push_back(stage_object(stage));
  }
  result["total"] = stage_object(total_of(profile.stages));
  result["total"].erase("name");
  result["dataset_bytes"] = profile.dataset_bytes;
  result["kept_bytes"] = profile.kept_bytes;
  result["peak_bytes"] = profile.peak_bytes;
  result["peak_at"] = {{"phase", profile.peak_phase},
                       {"stage", profile.peak_stage}};
  for (const Category category : kProfiledCategories) {
    result["memory"][to_text(category)] = profile.memory[category];
  }
  return result.dump(2);
}

}  // namespace reprise
