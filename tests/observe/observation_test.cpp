#include "support.h"

#include <reprise/observe/observer.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>

namespace reprise {
namespace {

DeviceSample sample_of(int64_t bytes, std::optional<double> utilisation = {}) {
  DeviceSample sample;
  sample.memory_bytes = bytes;
  sample.utilisation = utilisation;
  return sample;
}

Observation result_of(const Recording& recording) {
  Observation observation;
  recording.write_to(observation);
  return observation;
}

TEST(Observation, WeightsTheAverageByTime) {
  Recording recording;
  recording.add(0, sample_of(900, 90));  // the first sample has no weight
  recording.add(1, sample_of(100, 10));
  recording.add(4, sample_of(200, 50));
  const Observation observed = result_of(recording);
  EXPECT_EQ(observed.samples, 3);
  EXPECT_EQ(observed.average.memory_bytes, (100 * 1 + 200 * 3) / 4);
  EXPECT_EQ(observed.average.utilisation, (10 * 1 + 50 * 3) / 4.0);
  EXPECT_EQ(observed.peak.memory_bytes, 900);
  EXPECT_EQ(observed.peak.utilisation, 90);
  EXPECT_FALSE(observed.average.power_w.has_value());
  EXPECT_FALSE(observed.peak.clock_mhz.has_value());
}

TEST(Observation, WeightsAValueByTheTimeSinceThePreviousOne) {
  Recording recording;
  recording.add(0, sample_of(0));
  recording.add(1, sample_of(0, 100));
  recording.add(2, sample_of(0));  // no new value
  recording.add(4, sample_of(0, 20));
  EXPECT_EQ(result_of(recording).average.utilisation, (100 * 1 + 20 * 3) / 4.0);
}

TEST(Observation, WeightsDelayedValuesByTheirIntervals) {
  Recording recording;
  recording.add(0, sample_of(1));
  recording.add(1, sample_of(2));
  recording.add(2, sample_of(3));
  DeviceSample sample = sample_of(4);
  sample.past = {{0, 1, 80}, {1, 1.5, 20}};
  recording.add(3, sample);
  recording.add(PastUtilisation{2, 3.25, 10});  // the clocks differ slightly
  const Observation observed = result_of(recording);
  EXPECT_EQ(observed.samples, 4);
  EXPECT_NEAR(*observed.average.utilisation,
              (80 * 1 + 20 * 0.5 + 10 * 1.25) / (1 + 0.5 + 1.25), 1e-9);
  EXPECT_EQ(observed.peak.utilisation, 80);
  EXPECT_EQ(observed.series.t_s, (std::vector<double>{0, 1, 2, 3}));
  EXPECT_EQ(observed.series.utilisation, (std::vector<double>{80, 80, 20, 10}));
}

TEST(Observation, AveragesDelayedValuesPerPoint) {
  Recording recording;
  recording.add(0, sample_of(1));
  recording.add(1, sample_of(1));
  recording.add(2, sample_of(1));
  recording.add(PastUtilisation{0.5, 1.25, 40});
  recording.add(PastUtilisation{1.25, 2, 80});
  EXPECT_EQ(result_of(recording).series.utilisation,
            (std::vector<double>{40, 40, (40 * 0.25 + 80 * 0.75)}));
}

TEST(Observation, RecordsDelayedValuesWithoutDuration) {
  Recording recording;
  recording.add(PastUtilisation{0, 0, 30});
  EXPECT_EQ(result_of(recording).average.utilisation, 30);
  EXPECT_EQ(result_of(recording).samples, 0);
}

TEST(Observation, ReducesALongHistoryUniformly) {
  Recording recording;
  constexpr int kSamples = 40000;
  for (int i = 0; i < kSamples; ++i) {
    DeviceSample sample = sample_of(1);
    // Reported three samples later; busy in every second eighth of the time.
    const double at_s = std::max(0, i - 3);
    const double busy = (8 * (i - 3) / kSamples) % 2 == 0 ? 100 : 0;
    if (i > 3) sample.past = {{at_s - 1, at_s, busy}};
    recording.add(i, sample);
  }
  const Observation observed = result_of(recording);
  EXPECT_EQ(observed.samples, kSamples);
  EXPECT_NEAR(*observed.average.utilisation, 50, 0.1);
  ASSERT_LE(observed.series.t_s.size(), Recording::kPoints);
  ASSERT_EQ(observed.series.utilisation.size(), observed.series.t_s.size());
  for (size_t i = 0; i < observed.series.t_s.size(); ++i) {
    const double eighth = 8 * observed.series.t_s[i] / kSamples;
    const double into = eighth - std::floor(eighth);
    if (into < 0.05 || into > 0.95) continue;  // the point spans two eighths
    EXPECT_NEAR(observed.series.utilisation[i],
                static_cast<int>(eighth) % 2 == 0 ? 100 : 0, 1e-9)
        << i;
  }
}

TEST(Observation, AveragesSamplesAtOneTimeEqually) {
  Recording recording;
  recording.add(0, sample_of(100));
  recording.add(0, sample_of(300));
  EXPECT_EQ(result_of(recording).average.memory_bytes, 200);
  EXPECT_FALSE(result_of(Recording()).average.memory_bytes.has_value());
}

TEST(Observation, SubtractsTheBaselineFromMemoryOnly) {
  Recording recording(1000);
  recording.add(0, sample_of(1500, 50));
  recording.add(1, sample_of(1200, 70));
  recording.add(2, sample_of(400, 70));  // below the baseline: zero
  const Observation observed = result_of(recording);
  EXPECT_EQ(observed.baseline_bytes, 1000);
  EXPECT_EQ(observed.peak.memory_bytes, 500);
  EXPECT_EQ(observed.average.memory_bytes, 100);
  EXPECT_EQ(observed.average.utilisation, 70);
  EXPECT_EQ(observed.series.memory_bytes, (std::vector<int64_t>{500, 200, 0}));
}

TEST(Observation, KeepsAllSamplesOfAShortSeries) {
  Recording recording;
  for (int i = 0; i < 300; ++i) recording.add(i, sample_of(10 * i, i % 100));
  const Observation observed = result_of(recording);
  ASSERT_EQ(observed.series.t_s.size(), 300U);
  for (size_t i = 0; i < 300; ++i) {
    EXPECT_EQ(observed.series.t_s[i], static_cast<double>(i));
    EXPECT_EQ(observed.series.memory_bytes[i], static_cast<int64_t>(10 * i));
    EXPECT_EQ(observed.series.utilisation[i], static_cast<double>(i % 100));
  }
}

TEST(Observation, MergesAdjacentSamplesByMaximumAndMean) {
  Recording recording;
  for (int i = 0; i < 301; ++i) {
    recording.add(i,
                  sample_of(i % 2 == 0 ? 1000 + i : 5, i % 2 == 0 ? 10 : 20));
  }
  const Observation observed = result_of(recording);
  ASSERT_EQ(observed.series.t_s.size(), 151U);
  for (size_t i = 0; i < 150; ++i) {
    EXPECT_EQ(observed.series.t_s[i], 2.0 * static_cast<double>(i) + 0.5);
    EXPECT_EQ(observed.series.memory_bytes[i],
              static_cast<int64_t>(1000 + 2 * i));
    EXPECT_EQ(observed.series.utilisation[i], 15);
  }
  EXPECT_EQ(observed.series.t_s[150], 300);  // not merged
  EXPECT_EQ(observed.series.memory_bytes[150], 1300);
  EXPECT_EQ(observed.series.utilisation[150], 10);
}

TEST(Observation, SeriesNeverExceeds300PointsAndLosesNoSample) {
  Recording recording;
  double sum = 0;
  size_t fewest = Recording::kPoints;
  for (int i = 0; i < 20000; ++i) {
    recording.add(i, sample_of(i == 7777 ? 1 << 20 : i % 1000, i % 7));
    sum += i > 0 ? i % 7 : 0;
    if (i < 700 || i % 97 == 0) {
      const Observation observed = result_of(recording);
      ASSERT_LE(observed.series.t_s.size(), Recording::kPoints);
      ASSERT_EQ(observed.series.t_s.size(),
                observed.series.memory_bytes.size());
      ASSERT_EQ(observed.series.t_s.size(), observed.series.utilisation.size());
      if (i > 300) fewest = std::min(fewest, observed.series.t_s.size());
    }
  }
  EXPECT_GE(fewest, 150U);  // and the resolution stays high
  const Observation observed = result_of(recording);
  EXPECT_EQ(observed.samples, 20000);
  EXPECT_TRUE(
      std::is_sorted(observed.series.t_s.begin(), observed.series.t_s.end()));
  EXPECT_EQ(observed.peak.memory_bytes, 1 << 20);
  EXPECT_EQ(*std::max_element(observed.series.memory_bytes.begin(),
                              observed.series.memory_bytes.end()),
            1 << 20);
  EXPECT_NEAR(*observed.average.utilisation, sum / 19999, 1e-9);
}

TEST(Observation, FillsMissingValuesFromAdjacentPoints) {
  Recording recording;
  recording.add(0, sample_of(1));
  recording.add(1, sample_of(1, 30));
  recording.add(2, sample_of(1));
  recording.add(3, sample_of(1, 60));
  recording.add(4, sample_of(1));
  EXPECT_EQ(result_of(recording).series.utilisation,
            (std::vector<double>{30, 30, 30, 60, 60}));
}

TEST(Observation, WritesTheDocumentedJson) {
  Recording recording(100);
  DeviceSample sample = sample_of(150, 12.345);
  sample.clock_mhz = 1755;
  recording.add(0, sample);
  recording.add(0.5004, sample);
  Observation observed = result_of(recording);
  observed.source = "nvml";
  observed.interval_ms = 50;
  observed.seconds = 0.5004;
  observed.cost = 0.001;
  const auto json = nlohmann::json::parse(to_json(observed));
  const auto expected = nlohmann::json::parse(R"({
    "observed": {
      "source": "nvml", "interval_ms": 50.0, "samples": 2, "seconds": 0.5004,
      "cost": 0.001, "baseline": {"memory_bytes": 100},
      "average": {"memory_bytes": 50, "utilisation": 12.35, "power_w": null,
                  "clock_mhz": 1755.0},
      "peak": {"memory_bytes": 50, "utilisation": 12.35, "power_w": null,
               "clock_mhz": 1755.0}},
    "series": {"t_s": [0.0, 0.5], "memory_bytes": [50, 50],
               "utilisation": [12.3, 12.3], "clock_mhz": [1755.0, 1755.0]}})");
  EXPECT_EQ(json, expected) << json.dump(2);
}

TEST(Observation, WritesJsonWithoutSamples) {
  const auto json = nlohmann::json::parse(to_json(Observation()));
  EXPECT_TRUE(json["observed"]["baseline"]["memory_bytes"].is_null());
  EXPECT_TRUE(json["observed"]["average"]["memory_bytes"].is_null());
  EXPECT_TRUE(json["series"].is_object());
  EXPECT_TRUE(json["series"].empty());
}

}  // namespace
}  // namespace reprise
