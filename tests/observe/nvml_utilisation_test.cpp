#include "compat/cuda.h"
#include "fakes.h"
#include "support.h"

#include <reprise/observe/observer.h>
#include <reprise/observe/probe.h>

#include <chrono>
#include <functional>
#include <thread>

// If LibTorch has CUDA, cuda:0 is a real device whose bus id the fake NVML does not
// have. It is then found by its index, as without CUDA.
namespace reprise {
namespace {

using testing::Environment;
using testing::WithFakeNvml;

/// Seconds since the epoch, like NVML's timestamps.
double realtime_s() {
  return std::chrono::duration<double>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

void sleep_until(double at_s) {
  std::this_thread::sleep_for(
      std::chrono::duration<double>(at_s - realtime_s()));
}

double seconds_of(const std::function<void()>& body) {
  const double start_s = realtime_s();
  body();
  return realtime_s() - start_s;
}

constexpr double kPeriod_s = 1.0 / 6;
constexpr double kAlways = 0;

/// Adds a sample for the time up to `stamp_s`, which the driver returns from
/// `available_s` on.
void add_sample(const WithFakeNvml& nvml, double stamp_s, double available_s,
                unsigned percent) {
  ASSERT_LT(nvml->timed_count, 64U);
  nvml->timed[nvml->timed_count++] = {
      static_cast<unsigned long long>(1e6 * stamp_s),
      static_cast<unsigned long long>(1e6 * available_s), percent};
}

/// Adds consecutive samples from `from_s` to `to_s`.
void measure(const WithFakeNvml& nvml, double from_s, double to_s,
             double available_s, unsigned percent) {
  for (double at_s = from_s + kPeriod_s; at_s < to_s + 0.01;
       at_s += kPeriod_s) {
    add_sample(nvml, at_s, available_s, percent);
  }
}

/// The mean of the series between two times; -1 if it has no point there.
double mean_between(const Observation& observed, double from_s, double to_s) {
  double sum = 0;
  int count = 0;
  for (size_t i = 0; i < observed.series.utilisation.size(); ++i) {
    if (observed.series.t_s[i] <= from_s || observed.series.t_s[i] > to_s)
      continue;
    sum += observed.series.utilisation[i];
    ++count;
  }
  return count == 0 ? -1 : sum / count;
}

TEST(NvmlUtilisation, ExcludesTheTimeAroundAShortInterval) {
  const WithFakeNvml nvml;
  const double start_s = realtime_s() + 0.1;
  measure(nvml, start_s - 1, start_s, start_s + 1, 0);
  measure(nvml, start_s, start_s + 0.5, start_s + 1, 100);
  measure(nvml, start_s + 0.5, start_s + 1.5, start_s + 1, 0);
  Observer observer("cuda");
  sleep_until(start_s);
  observer.begin();
  sleep_until(start_s + 0.5);
  const Observation observed = observer.end();
  EXPECT_NEAR(observed.average.utilisation.value_or(-1), 100, 1e-6);
  EXPECT_EQ(observed.peak.utilisation, 100);
  EXPECT_NEAR(mean_between(observed, -1, 1), 100, 1e-6);
  EXPECT_GE(realtime_s(), start_s + 1) << "end() waits for delayed samples";
  EXPECT_LT(realtime_s(), start_s + 1.4) << "but not longer than needed";
  EXPECT_LT(observed.seconds, 0.7) << "waiting is not training time";
}

TEST(NvmlUtilisation, AssignsSamplesByTheirTimestamps) {
  const WithFakeNvml nvml;
  const double start_s = realtime_s() + 0.1;
  measure(nvml, start_s - 1, start_s, kAlways, 10);
  measure(nvml, start_s, start_s + 0.5, start_s + 0.9, 80);
  measure(nvml, start_s + 0.5, start_s + 1, start_s + 1.1, 20);
  measure(nvml, start_s + 1, start_s + 1.1, start_s + 1.1, 100);
  Observer observer("cuda");
  sleep_until(start_s);
  observer.begin();
  sleep_until(start_s + 1);
  const Observation observed = observer.end();
  EXPECT_NEAR(observed.average.utilisation.value_or(0), 50, 6);
  EXPECT_EQ(observed.peak.utilisation, 80);
  EXPECT_NEAR(mean_between(observed, -1, 0.4), 80, 1);
  EXPECT_NEAR(mean_between(observed, 0.6, 2), 20, 1);
}

TEST(NvmlUtilisation, AssignsLateSamplesToEarlierIntervals) {
  const WithFakeNvml nvml;
  const double start_s = realtime_s() + 0.1;
  measure(nvml, start_s - 1, start_s, kAlways, 10);
  measure(nvml, start_s, start_s + 2 * kPeriod_s, start_s + 0.8, 80);
  measure(nvml, start_s + 2 * kPeriod_s, start_s + 0.5, start_s + 1.2, 80);
  measure(nvml, start_s + 0.5, start_s + 1, start_s + 1.2, 100);
  measure(nvml, start_s + 1, start_s + 1.5, start_s + 2, 20);
  measure(nvml, start_s + 1.5, start_s + 2, start_s + 2, 100);
  Observer observer("cuda");
  sleep_until(start_s);
  observer.begin();
  sleep_until(start_s + 0.5);
  EXPECT_LT(seconds_of([&] { observer.pause(); }), 0.2)
      << "pause() does not wait";
  sleep_until(start_s + 1);
  observer.resume();
  sleep_until(start_s + 1.5);
  const Observation observed = observer.end();
  EXPECT_NEAR(observed.average.utilisation.value_or(0), 50, 6);
  EXPECT_EQ(observed.peak.utilisation, 80)
      << "samples of the pause do not count";
  EXPECT_NEAR(mean_between(observed, -1, 0.4), 80, 1);
  EXPECT_NEAR(mean_between(observed, 0.6, 2), 20, 1);
  EXPECT_LT(observed.seconds, 1.2);
}

TEST(NvmlUtilisation, IgnoresSamplesThatAreMostlyOutsideTheTraining) {
  const WithFakeNvml nvml;
  const auto probe = make_probe("cuda");
  const double start_s = realtime_s();
  probe->restart();
  add_sample(nvml, start_s - 0.1, kAlways, 1);
  add_sample(nvml, start_s + 0.05, kAlways,
             2);  // a third of the period is training
  add_sample(nvml, start_s + 0.20, kAlways, 3);
  add_sample(nvml, start_s + 20, kAlways, 4);  // a gap, not a period of 19.8 s
  auto past = probe->sample().past;
  ASSERT_EQ(past.size(), 2U);
  EXPECT_EQ(past[0].percent, 3);
  EXPECT_NEAR(past[0].from_s, 0.05, 0.03);
  EXPECT_NEAR(past[0].to_s, 0.20, 0.03);
  EXPECT_EQ(past[1].percent, 4);
  EXPECT_NEAR(past[1].from_s, 20 - kPeriod_s, 0.03);
  EXPECT_NEAR(past[1].to_s, 20, 0.03);
  EXPECT_TRUE(probe->take_pending().empty()) << "every sample counts once";
}

TEST(NvmlUtilisation, WeightsASampleByItsTrainingTime) {
  const WithFakeNvml nvml;
  const auto probe = make_probe("cuda");
  const double start_s = realtime_s();
  probe->restart();
  add_sample(nvml, start_s - 0.2, kAlways, 1);
  add_sample(nvml, start_s + 0.4, kAlways, 70);
  const auto past = probe->sample().past;
  ASSERT_EQ(past.size(), 1U);
  EXPECT_EQ(past[0].from_s, 0);
  EXPECT_NEAR(past[0].to_s, 0.4, 0.03);
}

TEST(NvmlUtilisation, AcceptsAShortPauseWithinAPeriod) {
  const WithFakeNvml nvml;
  const auto probe = make_probe("cuda");
  const double start_s = realtime_s();
  probe->restart();
  sleep_until(start_s + 0.2);
  probe->stop();
  EXPECT_FALSE(probe->sample().utilisation.has_value());
  sleep_until(start_s + 0.25);
  probe->restart();
  sleep_until(start_s + 0.45);
  probe->stop();
  add_sample(nvml, start_s, kAlways, 0);
  add_sample(nvml, start_s + 0.45, kAlways, 70);
  add_sample(nvml, start_s + 0.9, kAlways, 90);
  EXPECT_FALSE(probe->has_pending()) << "this was the last sample";
  const auto past = probe->take_pending();
  ASSERT_EQ(past.size(), 1U);
  EXPECT_EQ(past[0].percent, 70);
  EXPECT_EQ(past[0].from_s, 0);
  EXPECT_NEAR(past[0].to_s, 0.4, 0.05);
}

TEST(NvmlUtilisation, EndStopsWaitingAfterATimeout) {
  const WithFakeNvml nvml;
  nvml->samples_spin_us = 1000;
  measure(nvml, realtime_s() - 1, realtime_s(), kAlways, 77);
  Observer observer("cuda");
  observer.begin();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const int calls = nvml->sample_calls;
  Observation observed;
  const double waited_s = seconds_of([&] { observed = observer.end(); });
  EXPECT_GT(waited_s, 1.15);
  EXPECT_LT(waited_s, 1.6);
  EXPECT_GE(nvml->sample_calls, calls + 10);
  EXPECT_LT(observed.seconds, 0.4);
  EXPECT_LT(observed.cost, 0.05) << "waiting is not counted as cost";
  EXPECT_NEAR(observed.average.utilisation.value_or(-1), 40, 1e-6)
      << "the rate is used instead";
  EXPECT_LT(seconds_of([&] { observer.end(); }), 0.1)
      << "the second call does not wait";
}

TEST(NvmlUtilisation, DoesNotWaitWithoutBufferedSamples) {
  for (const int error : {3, 999}) {
    const WithFakeNvml nvml;
    nvml->samples_error = error;
    Observer observer("cuda");
    observer.begin();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_LT(seconds_of([&] { observer.end(); }), 0.3) << error;
  }
  const WithFakeNvml old(REPRISE_FAKE_NVML_OLD);
  Observer observer("cuda");
  observer.begin();
  EXPECT_LT(seconds_of([&] { observer.end(); }), 0.3);
}

TEST(NvmlUtilisation, UsesArrivalTimesIfTimestampsAreInvalid) {
  for (const double off_s : {-7200.0, 7200.0}) {
    const WithFakeNvml nvml;
    const double start_s = realtime_s();
    add_sample(nvml, start_s + off_s - 1, kAlways, 90);  // before the interval
    add_sample(nvml, start_s + off_s, start_s + 0.2, 50);
    add_sample(nvml, start_s + off_s + 1, start_s + 0.2, 70);
    add_sample(nvml, start_s + off_s + 2, start_s + 0.5,
               90);  // after the interval
    Observer observer("cuda");
    observer.begin();
    sleep_until(start_s + 0.4);
    Observation observed;
    EXPECT_LT(seconds_of([&] { observed = observer.end(); }), 0.3);
    EXPECT_NEAR(observed.average.utilisation.value_or(-1), 60, 1e-6);
    EXPECT_EQ(observed.peak.utilisation, 60);
  }
}

TEST(NvmlUtilisation, UsesRatesOfTheTrainingOnly) {
  const WithFakeNvml nvml;
  nvml->rate = 90;
  nvml->later_rate = 30;
  const double start_s = realtime_s();
  nvml->later_us = static_cast<unsigned long long>(1e6 * (start_s + 0.9));
  Observer observer("cuda");
  observer.begin();
  sleep_until(start_s + 1.5);
  const Observation observed = observer.end();
  EXPECT_NEAR(observed.average.utilisation.value_or(-1), 30, 1e-6);
  EXPECT_EQ(observed.peak.utilisation, 30);
  EXPECT_GE(nvml->rate_calls, 3);
  EXPECT_LE(nvml->rate_calls, 8) << "rates are read rarely";
}

TEST(NvmlUtilisation, UsesTheLastRateOfAShortInterval) {
  const WithFakeNvml nvml;
  nvml->rate = 90;
  nvml->later_rate = 20;
  const double start_s = realtime_s();
  nvml->later_us = static_cast<unsigned long long>(1e6 * (start_s + 0.35));
  Observer observer("cuda");
  observer.begin();
  sleep_until(start_s + 0.4);
  EXPECT_NEAR(observer.end().average.utilisation.value_or(-1), 20, 1e-6);
}

TEST(NvmlUtilisation, DoesNotReadRatesIfThereAreSamples) {
  const WithFakeNvml nvml;
  const auto probe = make_probe("cuda");
  const double start_s = realtime_s();
  probe->restart();
  sleep_until(start_s + 0.3);
  EXPECT_TRUE(probe->sample().past.empty());
  EXPECT_EQ(nvml->rate_calls, 1);
  measure(nvml, start_s, start_s + 0.3, kAlways, 60);
  sleep_until(start_s + 0.4);
  EXPECT_EQ(probe->sample().past.size(), 1U);
  sleep_until(start_s + 0.8);
  EXPECT_TRUE(probe->sample().past.empty());
  EXPECT_EQ(nvml->rate_calls, 1);
  probe->stop();
  EXPECT_TRUE(probe->take_pending().empty());
}

}  // namespace
}  // namespace reprise
