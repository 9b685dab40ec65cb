#include "base/json_text.h"

#include <reprise/base/bytes.h>
#include <reprise/train/summary.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <string_view>

namespace reprise {
namespace {

using nlohmann::ordered_json;

constexpr Category kCategories[] = {
    Category::kParameters,  Category::kGradients, Category::kOptimizer,
    Category::kActivations, Category::kWorkspace, Category::kData};

/// Calls `visit` for each scalar or string field, in the order of the JSON.
template <class Summary, class Visit>
void for_each_field(Summary& s, Visit&& visit) {
  visit("model", s.model);
  visit("parameters", s.parameters);
  visit("data", s.data);
  visit("device", s.device);
  visit("precision", s.precision);
  visit("optimizer", s.optimizer);
  visit("recompute", s.recompute);
  visit("micro_batch", s.micro_batch);
  visit("accumulate", s.accumulate);
  visit("global_batch", s.global_batch);
  visit("ranks", s.ranks);
  visit("backend", s.backend);
  visit("reduce_calls", s.reduce_calls);
  visit("reduce_bytes", s.reduce_bytes);
  visit("reduce_windows", s.reduce_windows);
  visit("reduce_s", s.reduce_s);
  visit("reduce_wait_s", s.reduce_wait_s);
  visit("gather_calls", s.gather_calls);
  visit("gather_bytes", s.gather_bytes);
  visit("gather_wait_s", s.gather_wait_s);
  visit("steps", s.steps);
  visit("skipped", s.skipped);
  visit("time_s", s.time_s);
  visit("samples_per_s", s.samples_per_s);
  visit("wait_s", s.wait_s);
  visit("data_samples", s.data_samples);
  visit("warnings", s.warnings);
  visit("peak_bytes", s.peak_bytes);
  visit("dataset_bytes", s.dataset_bytes);
  visit("reserved_bytes", s.reserved_bytes);
  visit("kept_bytes", s.kept_bytes);
  visit("host_bytes", s.host_bytes);
  visit("host_state_bytes", s.host_state_bytes);
  visit("rss_peak_bytes", s.rss_peak_bytes);
  visit("limit_bytes", s.limit_bytes);
  visit("window_peak_bytes", s.window_peak_bytes);
  visit("replans", s.replans);
  visit("graph", s.graph);
  visit("graph_captures", s.graph_captures);
  visit("graph_replays", s.graph_replays);
  visit("eval_metrics", s.eval_metrics);
}

template <class Summary, class Visit>
void for_each_optional(Summary& s, Visit&& visit) {
  visit("loss", s.loss);
  visit("eval_loss", s.eval_loss);
}

/// Returns the milliseconds per window at the measured speed.
double step_ms(const TrainSummary& s) {
  return s.samples_per_s > 0
             ? 1000 * static_cast<double>(s.global_batch) / s.samples_per_s
             : 0;
}

/// Returns the seconds per epoch at the measured speed.
double epoch_s(const TrainSummary& s) {
  return s.samples_per_s > 0
             ? static_cast<double>(s.data_samples) / s.samples_per_s
             : 0;
}

std::string row(std::string_view name, const std::string& value) {
  return fmt::format("{:<24}{:>14}\n", name, value);
}

std::string duration(double seconds) {
  return fmt::format("{:.2f} s", seconds);
}

std::string line_of_run(const TrainSummary& s) {
  return fmt::format("{}, {} × {}{} on {}, {}, {}, recompute {}", s.model,
                     s.micro_batch, s.accumulate,
                     s.ranks > 1 ? fmt::format(" × {} ranks", s.ranks) : "",
                     s.device, s.precision, s.optimizer, s.recompute);
}

std::string compare_row(std::string_view name, const std::string& before,
                        const std::string& after, double a, double b) {
  return fmt::format("{:<18}{:>14}{:>14}{:>10}\n", name, before, after,
                     a > 0 ? fmt::format("×{:.3f}", b / a) : std::string("-"));
}

}  // namespace

std::string metric_text(const std::string& name, double value) {
  return name.ends_with("accuracy") ? fmt::format("{:.2f} %", 100 * value)
                                    : fmt::format("{:.4f}", value);
}

std::string to_json(const TrainSummary& summary) {
  ordered_json result;
  for_each_field(summary, [&](const char* name, const auto& field) {
    result[name] = field;
  });
  for_each_optional(summary, [&](const char* name, const auto& field) {
    result[name] = field ? ordered_json(*field) : ordered_json(nullptr);
  });
  result["step_ms"] = step_ms(summary);
  result["epoch_s"] = epoch_s(summary);
  result["predicted"] = nullptr;
  if (summary.predicted) {
    result["predicted"] = {{"peak_bytes", summary.predicted->peak_bytes},
                           {"step_ms", summary.predicted->step_ms}};
  }
  result["peak_at"] = {{"phase", summary.peak_phase},
                       {"stage", summary.peak_stage}};
  for (const Category category : kCategories) {
    result["memory"][to_text(category)] = summary.memory[category];
  }
  return result.dump(2);
}

TrainSummary summary_from_json(const std::string& text) {
  const auto source = parse_json<ordered_json>(text);
  TORCH_CHECK(source.is_object(),
              "[summary] expected the summary.json of a run, got no JSON "
              "object");
  TrainSummary summary;
  std::string at;
  try {
    for_each_field(summary, [&](const char* name, auto& field) {
      at = name;
      // Runs of version 0.1 have no such field.
      if (at == "host_state_bytes" && !source.contains(at)) return;
      source.at(name).get_to(field);
    });
    for_each_optional(summary, [&](const char* name, auto& field) {
      at = name;
      if (!source.at(name).is_null()) field = source[name].get<double>();
    });
    at = "predicted";
    if (const auto& predicted = source.at("predicted"); !predicted.is_null()) {
      summary.predicted = {predicted.at("peak_bytes"), predicted.at("step_ms")};
    }
    at = "peak_at";
    summary.peak_phase = source.at("peak_at").at("phase");
    summary.peak_stage = source.at("peak_at").at("stage");
    at = "memory";
    for (const Category category : kCategories) {
      summary.memory.bytes[static_cast<size_t>(category)] =
          source.at("memory").at(to_text(category));
    }
  } catch (const ordered_json::exception&) {
    TORCH_CHECK(false, "[summary] expected the summary.json of a run, got one ",
                source.contains(at) ? "with a wrong '" : "without '", at, "'");
  }
  return summary;
}

std::string to_table(const TrainSummary& s) {
  std::string text = line_of_run(s) + "\n\n";
  text += row("Time", duration(s.time_s));
  text += row("Samples/second", fmt::format("{:.2f}", s.samples_per_s));
  if (s.predicted) {
    text += row("Update", fmt::format("{:.1f} ms", step_ms(s)));
    text += row("  predicted", fmt::format("{:.1f} ms", s.predicted->step_ms));
  }
  text += row("Peak memory", format_bytes(s.peak_bytes));
  if (s.predicted) {
    text += row("  predicted", format_bytes(s.predicted->peak_bytes));
  }
  if (s.limit_bytes > 0) {
    text +=
        row("  limit", format_bytes(s.limit_bytes) +
                           (s.peak_bytes > s.limit_bytes ? ", PASSED" : ""));
  }
  if (s.reserved_bytes > 0) {
    text += row("  reserved", format_bytes(s.reserved_bytes));
  }
  if (s.dataset_bytes > 0) {
    text += row("  dataset beside it", format_bytes(s.dataset_bytes));
  }
  if (s.replans > 0) text += row("  planned again", std::to_string(s.replans));
  if (s.graph_captures > 0) {
    text += row("CUDA graphs", fmt::format("{}, {} replays", s.graph_captures,
                                           s.graph_replays));
  }
  if (s.graph.starts_with("off: ")) {
    text += fmt::format("{:<24}{}\n", "CUDA graphs", s.graph);
  }
  text += row("Kept after forward", format_bytes(s.kept_bytes));
  if (s.host_bytes > 0) {
    text += row("Activations on the host", format_bytes(s.host_bytes));
  }
  if (s.host_state_bytes > 0) {
    text += row("Optimizer on the host", format_bytes(s.host_state_bytes));
  }
  text += row("Process (RSS) peak", format_bytes(s.rss_peak_bytes));
  text += row("Steps", std::to_string(s.steps));
  if (s.skipped > 0) text += row("  skipped", std::to_string(s.skipped));
  if (s.wait_s > 0) {
    text += row("Waited for data",
                fmt::format("{:.2f} s, {:.1f} %", s.wait_s,
                            100 * s.wait_s / std::max(s.time_s, 1e-9)));
  }
  if (s.reduce_calls > 0) {
    text += row("Gradients reduced",
                fmt::format("{} in {} calls", format_bytes(s.reduce_bytes),
                            s.reduce_calls));
  }
  if (s.reduce_s > 0) {
    text +=
        row("  behind the backward",
            fmt::format("{:.0f} %", 100 * (1 - s.reduce_wait_s / s.reduce_s)));
  }
  if (s.gather_calls > 0) {
    text += row("Parameters gathered",
                fmt::format("{} in {} calls", format_bytes(s.gather_bytes),
                            s.gather_calls));
  }
  if (s.loss) text += row("Loss", fmt::format("{:.4f}", *s.loss));
  if (s.eval_loss)
    text += row("Test loss", fmt::format("{:.4f}", *s.eval_loss));
  for (const auto& [name, value] : s.eval_metrics) {
    text += row("Test " + name, metric_text(name, value));
  }
  for (const auto& warning : s.warnings) {
    text += fmt::format("Time is doubtful: {}\n", warning);
  }
  if (s.peak_phase.empty()) return text;
  text +=
      fmt::format("\nMemory at the peak of a window ({}{}{})\n", s.peak_phase,
                  s.peak_stage.empty() ? "" : " of ", s.peak_stage);
  for (const Category category : kCategories) {
    const int64_t bytes = s.memory[category];
    text += fmt::format(
        "  {:<22}{:>14}{:>7.1f} %\n", to_text(category), format_bytes(bytes),
        100.0 * static_cast<double>(bytes) /
            static_cast<double>(std::max<int64_t>(s.window_peak_bytes, 1)));
  }
  text += fmt::format("  {:<22}{:>14}\n", "together",
                      format_bytes(s.window_peak_bytes));
  return text;
}

std::string compare(const TrainSummary& a, const TrainSummary& b) {
  std::string text =
      fmt::format("BEFORE  {}\nAFTER   {}\n\n", line_of_run(a), line_of_run(b));
  text +=
      fmt::format("{:<18}{:>14}{:>14}{:>10}\n", "", "BEFORE", "AFTER", "RATIO");
  text += compare_row("Time", duration(a.time_s), duration(b.time_s), a.time_s,
                      b.time_s);
  text += compare_row("Samples/second", fmt::format("{:.2f}", a.samples_per_s),
                      fmt::format("{:.2f}", b.samples_per_s), a.samples_per_s,
                      b.samples_per_s);
  const auto bytes = [&](std::string_view name, int64_t before, int64_t after) {
    text +=
        compare_row(name, format_bytes(before), format_bytes(after),
                    static_cast<double>(before), static_cast<double>(after));
  };
  bytes("Peak memory", a.peak_bytes, b.peak_bytes);
  bytes("Kept after forward", a.kept_bytes, b.kept_bytes);
  for (const Category category : kCategories) {
    bytes("  " + to_text(category), a.memory[category], b.memory[category]);
  }
  bytes("RSS peak", a.rss_peak_bytes, b.rss_peak_bytes);
  if (a.loss && b.loss) {
    text += compare_row("Loss", fmt::format("{:.4f}", *a.loss),
                        fmt::format("{:.4f}", *b.loss), *a.loss, *b.loss);
  }
  return text;
}

}  // namespace reprise
