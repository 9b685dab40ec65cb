// Tested by tests/plan/cluster_test.cpp.
#include "plan/drawing.h"

#include <reprise/base/bytes.h>
#include <reprise/plan/cluster.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>

namespace reprise {
namespace {

using detail::format_ms;
using nlohmann::json;

json to_json_value(const ClusterPoint& point) {
  return {{"ranks", point.ranks},
          {"shard", to_text(point.shard)},
          {"feasible", point.feasible},
          {"micro_batch", point.plan.micro_batch},
          {"accumulate", point.plan.accumulate},
          {"schedule", point.plan.schedule.to_text()},
          {"parameters", point.parameters},
          {"gradients", point.gradients},
          {"optimizer", point.optimizer},
          {"peak_bytes", point.peak_bytes},
          {"sent_bytes", point.sent_bytes},
          {"exposed_ms", point.exposed_ms},
          {"step_ms", point.step_ms},
          {"samples_per_s", point.samples_per_s},
          {"efficiency", point.efficiency}};
}

std::string row_of(const ClusterPoint& point) {
  const std::string head =
      fmt::format("{:>6}  {:<10}", point.ranks, to_text(point.shard));
  if (!point.feasible) {
    return fmt::format("{} does not fit: needs {}\n", head,
                       format_bytes(point.peak_bytes));
  }
  const std::string sizes =
      fmt::format("{} × {}", point.plan.micro_batch, point.plan.accumulate);
  return fmt::format(
      "{} {:>10} {:>10} {:>10} {:>10} {:>10} {:>11.1f} {:>6.0f} %\n", head,
      sizes, format_bytes(point.peak_bytes), format_bytes(point.sent_bytes),
      format_ms(point.step_ms), format_ms(point.exposed_ms),
      point.samples_per_s, 100 * point.efficiency);
}

std::string header() {
  return fmt::format(
      "{:>6}  {:<10} {:>10} {:>10} {:>10} {:>10} {:>10} {:>11} {:>8}\n",
      "ranks", "shard", "batches", "peak", "sent", "step", "exposed",
      "samples/s", "efficient");
}

}  // namespace

std::string to_text(const ClusterPlan& plan) {
  const ClusterRequest& request = plan.request;
  std::string text =
      fmt::format("{} ranks, {} samples per update, {} of each device\n\n",
                  request.ranks, request.plan.global_batch,
                  request.plan.memory > 0 ? format_bytes(request.plan.memory)
                                          : std::string("all memory"));
  text += header();
  for (const ClusterPoint& point : plan.levels) text += row_of(point);
  text += "\nOther numbers of ranks, each with as many samples\n" + header();
  for (const ClusterPoint& point : plan.scaling) text += row_of(point);
  text += "\nEfficiency\n";
  constexpr int kColumns = 50;
  for (const ClusterPoint& point : plan.scaling) {
    const auto cells =
        static_cast<size_t>(std::clamp(point.efficiency, 0.0, 1.0) * kColumns);
    std::string bar;
    for (size_t i = 0; i < cells; ++i) bar += "█";
    text +=
        fmt::format("{:>6} {}{} {:.0f} %\n", point.ranks, bar,
                    std::string(kColumns - cells, ' '), 100 * point.efficiency);
  }
  text += fmt::format(
      "\nAssumes {}/s and {} µs per message for each rank, in both directions "
      "at once, all\nranks equally far from each other; rings for all "
      "collectives; stages that take as long\nas on the device that was "
      "measured; equal shares of tokens. Sent: bytes of one rank and\nupdate. "
      "Exposed: time that the backward does not hide, besides waiting for "
      "parameters.\n",
      format_bytes(static_cast<int64_t>(request.network.bytes_per_ms * 1000)),
      static_cast<int64_t>(request.network.latency_ms * 1000));
  return text;
}

std::string to_json(const ClusterPlan& plan) {
  const ClusterRequest& request = plan.request;
  json value{{"request",
              {{"ranks", request.ranks},
               {"global_batch", request.plan.global_batch},
               {"memory", request.plan.memory},
               {"bytes_per_s", request.network.bytes_per_ms * 1000},
               {"latency_us", request.network.latency_ms * 1000},
               {"shard_group", request.shard_group}}},
             {"levels", json::array()},
             {"scaling", json::array()}};
  for (const auto& point : plan.levels) {
    value["levels"].push_back(to_json_value(point));
  }
  for (const auto& point : plan.scaling) {
    value["scaling"].push_back(to_json_value(point));
  }
  return value.dump(2);
}

}  // namespace reprise
