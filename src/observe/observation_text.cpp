// Tested by tests/observe/observation_test.cpp.
#include <reprise/base/bytes.h>
#include <reprise/observe/observer.h>

#include <fmt/format.h>

namespace reprise {
namespace {

std::string bytes(const std::optional<int64_t>& value) {
  return value ? format_bytes(*value) : "-";
}

std::string number(const std::optional<double>& value, const char* unit) {
  return value ? fmt::format("{:.0f} {}", *value, unit) : "-";
}

}  // namespace

std::string to_table(const Observation& observed) {
  std::string text =
      fmt::format("\n{:<24}{:>14}{:>14}\n", "Device", "average", "peak");
  const auto row = [&](const char* name, const std::string& average,
                       const std::string& peak) {
    if (peak == "-") return;
    text += fmt::format("  {:<22}{:>14}{:>14}\n", name, average, peak);
  };
  row("memory", bytes(observed.average.memory_bytes),
      bytes(observed.peak.memory_bytes));
  row("utilisation", number(observed.average.utilisation, "%"),
      number(observed.peak.utilisation, "%"));
  row("power", number(observed.average.power_w, "W"),
      number(observed.peak.power_w, "W"));
  row("clock", number(observed.average.clock_mhz, "MHz"),
      number(observed.peak.clock_mhz, "MHz"));
  return text +
         fmt::format(
             "  {} samples, one per {:g} ms, using {:.3f} % of the time\n",
             observed.samples, observed.interval_ms, 100 * observed.cost);
}

}  // namespace reprise
