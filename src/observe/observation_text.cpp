#include <reprise/base/bytes.h>
#include <reprise/observe/observation.h>

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

std::string to_table(const Observation& seen) {
  std::string text = fmt::format("\n{:<24}{:>14}{:>14}\n", "Seen of the device",
                                 "average", "peak");
  const auto row = [&](const char* name, const std::string& average,
                       const std::string& peak) {
    if (peak == "-") return;
    text += fmt::format("  {:<22}{:>14}{:>14}\n", name, average, peak);
  };
  row("memory", bytes(seen.average.memory_bytes),
      bytes(seen.peak.memory_bytes));
  row("utilisation", number(seen.average.utilisation, "%"),
      number(seen.peak.utilisation, "%"));
  row("power", number(seen.average.power_w, "W"),
      number(seen.peak.power_w, "W"));
  row("clock", number(seen.average.clock_mhz, "MHz"),
      number(seen.peak.clock_mhz, "MHz"));
  return text + fmt::format(
                    "  every {:g} ms, {} times, for {:.3f} % of the "
                    "time\n",
                    seen.interval_ms, seen.samples, 100 * seen.cost);
}

}  // namespace reprise
