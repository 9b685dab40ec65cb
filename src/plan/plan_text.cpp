#include "plan/drawing.h"
#include "plan/plan_format.h"

#include <reprise/base/bytes.h>
#include <reprise/plan/planner.h>

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <numeric>

namespace reprise {
namespace {

using detail::columns_of;
using detail::describe_batches;
using detail::describe_schedule;
using detail::flow;
using detail::format_change;
using detail::format_exact_bytes;
using detail::format_ms;
using detail::format_sufficient_bytes;
using detail::recompute_text;
using detail::shorten;
using detail::state_on_host_text;

constexpr int kNameColumns = 32;
constexpr int kMaxRows = 10;  // of the chain; longer chains share cells
constexpr int kRowCells = 80;
constexpr size_t kMaxNames = 12;

double samples_per_s(const Plan& plan) {
  return plan.step_ms > 0
             ? 1000 * static_cast<double>(plan.global_batch) / plan.step_ms
             : 0;
}

std::string percent_of(int64_t part, int64_t whole) {
  return fmt::format(
      "{:.1f} %", 100 * static_cast<double>(part) / static_cast<double>(whole));
}

std::string name_of_stage(const PlanResult& result, int stage) {
  const auto i = static_cast<size_t>(stage);
  if (i >= result.stages.size()) return fmt::format("stage {}", stage);
  return fmt::format("'{}'", shorten(result.stages[i], kNameColumns));
}

std::string settings_section(const PlanResult& result,
                             const std::optional<PlanMeasurement>& measured) {
  const Plan& plan = result.plan;
  std::string text = fmt::format(
      "{}, {}{}\nrecompute {}: {}\n", describe_batches(plan),
      to_text(plan.precision),
      std::string(plan.graph ? ", as a CUDA graph" : "") +
          (plan.update == UpdateMode::kBackward ? ", updated in the backward"
                                                : ""),
      plan.schedule.name(), describe_schedule(plan.schedule));
  if (plan.weight_copies) {
    text +=
        fmt::format("with --weight-copies {}\n", to_text(*plan.weight_copies));
  }
  if (plan.settings) {
    text += fmt::format("with --layout {} --autotune {}\n",
                        to_text(plan.settings->layout),
                        to_text(plan.settings->autotune));
  }
  text += fmt::format("predicted  peak {}", format_bytes(plan.peak_bytes));
  if (result.request.memory > 0) {
    text += fmt::format(", {} of the budget of {}",
                        percent_of(plan.peak_bytes, result.request.memory),
                        format_bytes(result.request.memory));
  }
  text += fmt::format("; step {}, {:.1f} samples/s\n", format_ms(plan.step_ms),
                      samples_per_s(plan));
  if (plan.host_bytes > 0) {
    text += fmt::format("host       {} of activations in host memory\n",
                        format_bytes(plan.host_bytes));
  }
  if (const auto what = state_on_host_text(plan.state); !what.empty()) {
    text += fmt::format("host       {} of {} in host memory\n",
                        format_bytes(plan.host_state.total()), what);
  }
  if (!measured) return text;
  return text +
         fmt::format(
             "measured   peak {} ({} against predicted); step {} ± {} ({})\n",
             format_bytes(measured->peak_bytes),
             format_change(static_cast<double>(measured->peak_bytes),
                           static_cast<double>(plan.peak_bytes)),
             format_ms(measured->step_ms), format_ms(measured->step_ms_spread),
             format_change(measured->step_ms, plan.step_ms));
}

std::string memory_section(const PlanResult& result) {
  const PeakReport& peak = result.plan.peak;
  return "\nMemory at the peak\n" +
         detail::draw_stack({{"parameters", peak.parameters},
                             {"gradients", peak.gradients},
                             {"optimizer", peak.optimizer},
                             {"data", peak.data},
                             {"kept activations", peak.kept},
                             {"gradients in flight", peak.in_flight},
                             {"workspace", peak.workspace}},
                            result.request.memory);
}

/// Returns a table of what is on the device at the peak, in host memory, and recomputed.
std::string places_section(const PlanResult& result) {
  const Plan& plan = result.plan;
  const auto bytes = [](int64_t count) {
    return count > 0 ? format_bytes(count) : std::string("-");
  };
  std::string text =
      fmt::format("\nWhere it is{:>24}{:>12}\n", "device", "host");
  const auto row = [&](const char* name, int64_t device, int64_t host) {
    text +=
        fmt::format("  {:<20}{:>13}{:>12}\n", name, bytes(device), bytes(host));
  };
  row("parameters", plan.peak.parameters, plan.host_state.parameters);
  row("gradients", plan.peak.gradients, plan.host_state.gradients);
  row("optimizer", plan.peak.optimizer, plan.host_state.optimizer);
  row("activations", plan.peak.kept, plan.host_bytes);
  int again = 0;
  for (int i = 0; i < plan.schedule.stages(); ++i) {
    again += plan.schedule.runs(i) > 1 ? 1 : 0;
  }
  if (again > 0) {
    text += fmt::format("  activations of {} of {} stages are recomputed\n",
                        again, plan.schedule.stages());
  }
  const char* what = plan.bound == TimeBound::kArithmetic
                         ? "the device's arithmetic"
                     : plan.bound == TimeBound::kLink
                         ? "copies between device and host"
                         : "the host, which submits the device's work";
  return text + fmt::format("  what sets the time: {}\n", what);
}

/// Returns "largest kept: 'stem' 512 MiB, 'layer1.0' 256 MiB, 3 others 96 MiB".
std::string largest_kept(const PlanResult& result) {
  const auto& bytes = result.plan.peak.kept_by_stage;
  std::vector<int> order(bytes.size());
  std::iota(order.begin(), order.end(), 0);
  const auto bytes_at = [&](int i) { return bytes[static_cast<size_t>(i)]; };
  std::erase_if(order, [&](int i) { return bytes_at(i) == 0; });
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return bytes_at(a) > bytes_at(b); });
  if (order.empty()) return "";
  std::vector<std::string> words{"largest", "kept:"};
  int64_t rest = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    if (i >= 3) {
      rest += bytes_at(order[i]);
      continue;
    }
    words.push_back(fmt::format("{} {}{}", name_of_stage(result, order[i]),
                                format_bytes(bytes_at(order[i])),
                                i + 1 < order.size() ? "," : ""));
  }
  if (order.size() > 3) {
    words.push_back(fmt::format("{} other{} {}", order.size() - 3,
                                order.size() > 4 ? "s" : "",
                                format_bytes(rest)));
  }
  return fmt::format("  {}\n", flow(words, 2, 2));
}

std::string reductions_table(const PlanResult& result) {
  if (result.peak_reductions.empty()) return "";
  int widest = 4;
  for (const PeakReduction& reduction : result.peak_reductions) {
    widest = std::max(widest, columns_of(reduction.what));
  }
  widest = std::min(widest, 48);
  std::string text =
      fmt::format("  {:<{}}{:>12}{:>12}{:>11}{:>10}\n", "what lowers it",
                  std::max(widest, 14), "peak", "saves", "step", "time");
  for (const PeakReduction& reduction : result.peak_reductions) {
    const bool timed = reduction.step_ms > 0;
    text += fmt::format(
        "  {:<{}}{:>12}{:>12}{:>11}{:>10}\n", shorten(reduction.what, widest),
        std::max(widest, 14), format_bytes(reduction.peak_bytes),
        format_bytes(result.plan.peak_bytes - reduction.peak_bytes),
        timed ? format_ms(reduction.step_ms) : "-",
        timed ? format_change(reduction.step_ms, result.plan.step_ms) : "-");
  }
  return text;
}

std::string peak_section(const PlanResult& result) {
  const PeakReport& peak = result.plan.peak;
  if (peak.phase.empty()) return reductions_table(result);
  std::string text = fmt::format("\nThe peak is in the {}", peak.phase);
  if (peak.stage >= 0) {
    text += fmt::format(" of stage {} '{}'", peak.stage,
                        shorten(peak.stage_name, kNameColumns));
  }
  text += fmt::format("\n{}", largest_kept(result));
  if (peak.is_floor) {
    text += fmt::format("  no schedule lowers it at micro-batch {}\n",
                        result.plan.micro_batch);
  }
  return text + reductions_table(result);
}

/// Returns the stages whose inputs are kept by the forward pass.
std::string kept_inputs(const PlanResult& result) {
  const Schedule& schedule = result.plan.schedule;
  std::vector<std::string> words{"stages", "with", "kept", "input:"};
  size_t count = 0;
  for (size_t i = 0; i < schedule.forward_ops(); ++i) {
    const Op& op = schedule.ops()[i];
    if (op.kind != OpKind::kForwardKeepInput || ++count > kMaxNames) continue;
    words.push_back(
        fmt::format("{} {}", op.stage, name_of_stage(result, op.stage)));
  }
  if (count == 0) return "";
  if (count > kMaxNames) {
    words.push_back(fmt::format("and {} more", count - kMaxNames));
  }
  for (size_t i = 4; i + 1 < words.size(); ++i) words[i] += ",";
  return fmt::format("  {}\n", flow(words, 2, 2));
}

/// How a stage is treated, from least to most recomputation. A stage is kept in
/// part if it runs as a variant, which saves less.
enum class Retention { kKept, kKeptInPart, kOnce, kMoreOften };

std::vector<Retention> retention_by_stage(const Schedule& schedule) {
  std::vector<Retention> retention;
  for (int i = 0; i < schedule.stages(); ++i) {
    const int runs = schedule.runs(i);
    retention.push_back(runs == 1   ? Retention::kKept
                        : runs == 2 ? Retention::kOnce
                                    : Retention::kMoreOften);
  }
  for (const Op& op : schedule.ops()) {
    Retention& state = retention[std::min(static_cast<size_t>(op.stage),
                                          retention.size() - 1)];
    if (op.variant > 0 && state == Retention::kKept)
      state = Retention::kKeptInPart;
  }
  return retention;
}

constexpr const char* kRetentionCells[] = {"█", "▓", "▒", "░"};

/// Draws one cell per stage, wider if there are few stages. If they do not fit
/// into kMaxRows rows, several stages share a cell, which shows the most
/// recomputed one.
std::string drawn_chain(const Schedule& schedule) {
  const std::vector<Retention> retention = retention_by_stage(schedule);
  const int stages = schedule.stages();
  const int together = (stages - 1) / (kRowCells * kMaxRows) + 1;
  const int cells = (stages + together - 1) / together;
  const int width = std::clamp(kRowCells / cells, 1, 4);
  std::string text;
  for (int cell = 0; cell < cells; ++cell) {
    const int first = cell * together;
    const Retention worst = *std::max_element(
        retention.begin() + first,
        retention.begin() + std::min(first + together, stages));
    if (cell % (kRowCells / width) == 0) {
      text += fmt::format("{}  {:>5}  ", cell > 0 ? "\n" : "", first);
    }
    for (int i = 0; i < width; ++i) {
      text += kRetentionCells[static_cast<size_t>(worst)];
    }
  }
  const bool parts = std::find(retention.begin(), retention.end(),
                               Retention::kKeptInPart) != retention.end();
  text += fmt::format("\n         █ kept  {}▒ recomputed once  ░ more often",
                      parts ? "▓ kept in part  " : "");
  if (together > 1) text += fmt::format("; {} stages per cell", together);
  return text + "\n";
}

std::string chain_section(const PlanResult& result) {
  const Schedule& schedule = result.plan.schedule;
  return fmt::format("\nThe chain of {} stages\n", schedule.stages()) +
         drawn_chain(schedule) + kept_inputs(result);
}

std::string bytes_label(double bytes) {
  return format_bytes(static_cast<int64_t>(bytes));
}

std::string mark_of(const FrontierPoint& point) {
  if (!point.strategy) return "·";
  return {static_cast<char>(std::toupper(recompute_text(point).front()))};
}

/// Returns the upper end of the memory axis. Points far beyond the others are
/// listed below the plot instead.
int64_t plotted_bytes(const PlanResult& result) {
  int64_t most = result.plan.peak_bytes;
  for (const auto& point : result.frontier) {
    most = std::max(most, point.peak_bytes);
  }
  return 2 * most;
}

/// Returns whether a vertical line at `x` leaves at least half of the plot to
/// the points.
bool near_points(const std::vector<detail::PlotPoint>& points, double x) {
  const auto [low, high] = std::minmax_element(
      points.begin(), points.end(),
      [](const auto& a, const auto& b) { return a.x < b.x; });
  const double span = high->x - low->x;
  return x > 0 && x >= low->x - span && x <= high->x + span;
}

std::string frontier_section(const PlanResult& result) {
  if (result.frontier.empty()) return "";
  const int64_t most = plotted_bytes(result);
  detail::ScatterPlot plot;
  std::vector<std::string> beyond;
  const auto add = [&](const FrontierPoint& point) {
    if (point.peak_bytes <= most) {
      plot.points.push_back({static_cast<double>(point.peak_bytes),
                             point.step_ms, mark_of(point)});
      return;
    }
    beyond.push_back(fmt::format("{} at micro-batch {} ({}, {}),",
                                 recompute_text(point), point.micro_batch,
                                 format_bytes(point.peak_bytes),
                                 format_ms(point.step_ms)));
  };
  for (const auto& point : result.frontier) add(point);
  for (const auto& point : result.references) add(point);
  plot.points.push_back(
      {static_cast<double>(result.plan.peak_bytes), result.plan.step_ms, "◆"});
  const int64_t budget = result.request.memory;
  if (near_points(plot.points, static_cast<double>(budget))) {
    plot.x_line = static_cast<double>(budget);
  } else if (budget > 0) {
    beyond.push_back(fmt::format("the budget ({}),", format_bytes(budget)));
  }
  std::string text = "\nStep time against peak memory\n";
  text += plot.draw(bytes_label, format_ms);
  text += "  ◆ the plan  · optimal  N none  A all  S sqrt";
  text += plot.x_line > 0 ? "  │ budget\n" : "\n";
  if (beyond.empty()) return text;
  beyond.back().pop_back();
  beyond.insert(beyond.begin(), "outside the plot:");
  return text + fmt::format("  {}\n", flow(beyond, 2, 2));
}

std::string alternatives_table(const PlanResult& result) {
  if (result.alternatives.empty()) return "";
  std::string text = fmt::format(
      "\nOther choices that fit\n  "
      "{:>11}{:>14}{:>11}{:>11}{:>11}{:>12}{:>12}\n",
      "micro-batch", "accumulation", "precision", "peak", "step", "samples/s",
      "recomputed");
  for (const Plan& plan : result.alternatives) {
    text += fmt::format("  {:>11}{:>14}{:>11}{:>11}{:>11}{:>12.1f}{:>12}\n",
                        plan.micro_batch, plan.accumulate,
                        to_text(plan.precision), format_bytes(plan.peak_bytes),
                        format_ms(plan.step_ms), samples_per_s(plan),
                        plan.schedule.total_runs() - plan.schedule.stages());
  }
  return text;
}

}  // namespace

std::string detail::describe_batches(const Plan& plan) {
  const bool even = plan.last_micro_batch == plan.micro_batch;
  return fmt::format(
      "micro-batch {} × {}{} = {} samples per update", plan.micro_batch,
      plan.accumulate,
      even ? "" : fmt::format(" (the last one {})", plan.last_micro_batch),
      plan.global_batch);
}

std::string detail::format_exact_bytes(int64_t bytes) {
  return fmt::format("{} ({} bytes)", format_bytes(bytes), bytes);
}

std::string detail::format_sufficient_bytes(int64_t bytes) {
  // One unit of the third digit makes up for the rounding.
  int64_t rounded = bytes;
  while (parse_bytes(format_bytes(rounded)) < bytes)
    rounded += bytes / 1000 + 1;
  return fmt::format("{} ({} bytes)", format_bytes(rounded), bytes);
}

std::string detail::recompute_text(const FrontierPoint& point) {
  return point.strategy ? Strategy{*point.strategy}.to_text() : "optimal";
}

std::string detail::describe_schedule(const Schedule& schedule) {
  const std::vector<Retention> retention = retention_by_stage(schedule);
  const auto count = [&](Retention state) {
    return std::count(retention.begin(), retention.end(), state);
  };
  const auto in_part = count(Retention::kKeptInPart);
  const auto kept = count(Retention::kKept) + in_part;
  const auto once = count(Retention::kOnce);
  const auto more = count(Retention::kMoreOften);
  const bool all = kept == schedule.stages();
  std::string text =
      all ? fmt::format("keeps all {} stages", kept)
          : fmt::format("keeps {} of {} stages", kept, schedule.stages());
  if (in_part > 0) text += fmt::format(", {} of them in part", in_part);
  if (all) return text;
  text += ", recomputes ";
  if (once > 0) text += fmt::format("{} once", once);
  if (more == 0) return text;
  int most = 0;
  for (int i = 0; i < schedule.stages(); ++i) {
    most = std::max(most, schedule.runs(i) - 1);
  }
  return text + fmt::format("{}{} up to {} times", once > 0 ? " and " : "",
                            more, most);
}

std::string describe(const Plan& plan) {
  const int again = plan.schedule.total_runs() - plan.schedule.stages();
  std::string host =
      plan.host_bytes > 0
          ? fmt::format(", {} on the host", format_bytes(plan.host_bytes))
          : std::string();
  if (const auto what = state_on_host_text(plan.state); !what.empty()) {
    host += fmt::format(", {} of {} on the host",
                        format_bytes(plan.host_state.total()), what);
  }
  return fmt::format(
      "micro-batch {} × {}, {} stage run{} recomputed{}, {} of memory{}",
      plan.micro_batch, plan.accumulate, again, again == 1 ? "" : "s",
      plan.update == UpdateMode::kBackward ? ", updated in the backward" : "",
      format_bytes(plan.peak_bytes), host);
}

std::string to_text(const PlanResult& result,
                    const std::optional<PlanMeasurement>& measured) {
  std::string text;
  if (!result.feasible) {
    text = fmt::format("Nothing fits into {}: the smallest plan needs {}\n\n",
                       format_exact_bytes(result.request.memory),
                       format_sufficient_bytes(result.smallest_bytes));
  }
  return text + settings_section(result, measured) + memory_section(result) +
         peak_section(result) + places_section(result) + chain_section(result) +
         frontier_section(result) + alternatives_table(result);
}

}  // namespace reprise
