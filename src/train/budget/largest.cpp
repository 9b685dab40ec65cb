#include "plan/drawing.h"
#include "plan/plan_format.h"

#include <reprise/base/bytes.h>
#include <reprise/train/planning.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace reprise {
namespace {

double factor_of(const Largest& largest) {
  return static_cast<double>(largest.value) /
         static_cast<double>(largest.plain);
}

std::string answer(const Largest& largest) {
  const std::string axis = to_text(largest.axis);
  if (largest.value == 0) {
    return fmt::format("not even the smallest {} fits\n", axis);
  }
  if (largest.plain == 0) {
    return fmt::format(
        "{} {} fits; without any technique not even the smallest does\n", axis,
        largest.value);
  }
  return fmt::format(
      "{} {} fits, {:.1f} times the {} that fit{} without any "
      "technique\n",
      axis, largest.value, factor_of(largest), largest.plain,
      largest.axis == LargestAxis::kBatch ? "" : "s");
}

std::string peak_row(const char* name, int64_t value, int64_t bytes) {
  return fmt::format("  {:<14}{:>8}  peak {}\n", name, value,
                     format_bytes(bytes));
}

}  // namespace

std::string to_text(const Largest& largest) {
  std::string text = answer(largest);
  if (largest.plain > 0) {
    text += peak_row("no technique", largest.plain, largest.plain_peak_bytes);
  }
  if (largest.value > 0) {
    text += peak_row("planned", largest.value, largest.peak_bytes);
  }
  if (!largest.plan) return text;
  const Plan& plan = *largest.plan;
  if (const auto what = detail::state_on_host_text(plan.state); !what.empty()) {
    text += fmt::format("{} of {} in host memory\n",
                        format_bytes(plan.host_state.total()), what);
  }
  return text + fmt::format("{}, {}\nrecompute {}: {}\n",
                            detail::describe_batches(plan),
                            to_text(plan.precision), plan.schedule.name(),
                            detail::describe_schedule(plan.schedule));
}

std::string to_json(const Largest& largest) {
  using nlohmann::ordered_json;
  ordered_json json;
  json["axis"] = to_text(largest.axis);
  json["value"] = largest.value;
  json["plain"] = largest.plain;
  json["factor"] = largest.plain > 0 ? ordered_json(factor_of(largest))
                                     : ordered_json(nullptr);
  json["peak_bytes"] = largest.peak_bytes;
  json["plain_peak_bytes"] = largest.plain_peak_bytes;
  json["plan"] = largest.plan ? ordered_json::parse(to_json(*largest.plan))
                              : ordered_json(nullptr);
  return json.dump(2);
}

}  // namespace reprise
