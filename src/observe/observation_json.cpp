// Tested by tests/observe/observation_test.cpp.
#include <reprise/observe/observer.h>

#include <nlohmann/json.hpp>

#include <cmath>

namespace reprise {
namespace {

using nlohmann::ordered_json;

// Results hold many series; insignificant digits are dropped.
constexpr int kSecondDigits = 3;
constexpr int kFigureDigits = 2;
constexpr int kSeriesDigits = 1;

double rounded(double value, int digits) {
  const double scale = std::pow(10.0, digits);
  return std::round(value * scale) / scale;
}

ordered_json rounded_or_null(const std::optional<double>& value) {
  return value ? ordered_json(rounded(*value, kFigureDigits))
               : ordered_json(nullptr);
}

ordered_json bytes_or_null(const std::optional<int64_t>& bytes) {
  return bytes ? ordered_json(*bytes) : ordered_json(nullptr);
}

ordered_json values_object(const Observation::Values& values) {
  return {{"memory_bytes", bytes_or_null(values.memory_bytes)},
          {"utilisation", rounded_or_null(values.utilisation)},
          {"power_w", rounded_or_null(values.power_w)},
          {"clock_mhz", rounded_or_null(values.clock_mhz)}};
}

ordered_json series_object(const Observation::Series& series) {
  ordered_json result = ordered_json::object();
  const auto add = [&result](const char* name, const std::vector<double>& list,
                             int digits) {
    if (list.empty()) return;
    auto& values = result[name] = ordered_json::array();
    for (const double value : list) values.push_back(rounded(value, digits));
  };
  add("t_s", series.t_s, kSecondDigits);
  if (!series.memory_bytes.empty()) {
    result["memory_bytes"] = series.memory_bytes;
  }
  add("utilisation", series.utilisation, kSeriesDigits);
  add("power_w", series.power_w, kSeriesDigits);
  add("clock_mhz", series.clock_mhz, kSeriesDigits);
  return result;
}

}  // namespace

std::string to_json(const Observation& observation) {
  ordered_json observed;
  observed["source"] = observation.source;
  observed["interval_ms"] = observation.interval_ms;
  observed["samples"] = observation.samples;
  observed["seconds"] = rounded(observation.seconds, 6);
  observed["cost"] = rounded(observation.cost, 6);
  observed["baseline"] = {
      {"memory_bytes", bytes_or_null(observation.baseline_bytes)}};
  observed["average"] = values_object(observation.average);
  observed["peak"] = values_object(observation.peak);
  ordered_json result;
  result["observed"] = std::move(observed);
  result["series"] = series_object(observation.series);
  return result.dump();
}

}  // namespace reprise
