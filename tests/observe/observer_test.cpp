#include "sleep.h"
#include "support.h"

#include <reprise/observe/observer.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <dirent.h>
#include <fstream>
#include <sys/resource.h>
#include <thread>
#include <time.h>

namespace reprise {
namespace {

using testing::sleep_ms;
using Clock = std::chrono::steady_clock;

/// What a test reads and writes of its probe, which the observer owns.
struct Shown {
  std::atomic<int64_t> bytes{1000};
  std::atomic<double> utilisation{50};
  std::atomic<int> samples{0}, restarts{0};
  std::atomic<int> spin_us{0}, sleep_ms{0};  ///< that a look takes
  std::atomic<bool> throws{false};
  std::atomic<int> stops{0}, asked{0};
  std::atomic<int> to_come{0};  ///< that it is asked for more in vain
  std::vector<PastUtilisation> rest;
  std::vector<int64_t> script;  ///< bytes of the first samples
};

class FakeProbe : public DeviceProbe {
 public:
  explicit FakeProbe(Shown& shown) : shown_(shown) {}
  std::string source() const override { return "process"; }
  void restart() override { ++shown_.restarts; }
  void stop() override { ++shown_.stops; }
  bool more_to_come() override {
    ++shown_.asked;
    return shown_.to_come-- > 0;
  }
  std::vector<PastUtilisation> rest() override { return shown_.rest; }
  ProbeAvailability visible() override { return {}; }
  DeviceSample sample() override {
    const auto number = static_cast<size_t>(shown_.samples++);
    if (shown_.throws) throw std::runtime_error("no");
    if (shown_.sleep_ms > 0) sleep_ms(shown_.sleep_ms);
    timespec start{}, now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &start);
    do {
      clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    } while ((now.tv_sec - start.tv_sec) * 1000000 +
                 (now.tv_nsec - start.tv_nsec) / 1000 <
             shown_.spin_us);
    DeviceSample sample;
    sample.memory_bytes = number < shown_.script.size() ? shown_.script[number]
                                                        : shown_.bytes.load();
    sample.utilisation = shown_.utilisation;
    return sample;
  }

 private:
  Shown& shown_;
};

std::unique_ptr<DeviceProbe> probe(Shown& shown) {
  return std::make_unique<FakeProbe>(shown);
}

/// Ids of this process's threads that have the observer's name.
std::vector<int> observing_threads() {
  std::vector<int> found;
  DIR* tasks = opendir("/proc/self/task");
  while (const dirent* entry = readdir(tasks)) {
    const std::string id = entry->d_name;
    std::ifstream file("/proc/self/task/" + id + "/comm");
    std::string name;
    if (file >> name && name == "reprise-observe") {
      found.push_back(std::stoi(id));
    }
  }
  closedir(tasks);
  return found;
}

TEST(Observer, BaselineIsTheMedian) {
  Shown shown;
  shown.script = {5000, 1000, 1200, 1100, 0};
  Observer observer(probe(shown));
  EXPECT_EQ(shown.samples, 5);
  shown.bytes = 1600;
  observer.begin();
  const Observation seen = observer.end();
  EXPECT_EQ(seen.baseline_bytes, 1100);
  EXPECT_EQ(seen.peak.memory_bytes, 500);
}

TEST(Observer, BaselineCanBeTakenAgain) {
  Shown shown;
  Observer observer(probe(shown));
  shown.bytes = 3000;
  observer.take_baseline();
  observer.begin();
  EXPECT_NE(testing::error_of([&] {
              observer.take_baseline();
            }).find("before begin()"),
            std::string::npos);
  EXPECT_EQ(observer.end().baseline_bytes, 3000);
}

TEST(Observer, AShortPartIsSeenAtBothEnds) {
  Shown shown;
  Observer observer(probe(shown), {.interval_ms = 10000});
  shown.bytes = 1500;
  observer.begin();
  shown.bytes = 4000;
  sleep_ms(2);
  const Observation seen = observer.end();
  EXPECT_EQ(seen.samples, 2);
  EXPECT_EQ(seen.series.memory_bytes, (std::vector<int64_t>{500, 3000}));
  EXPECT_EQ(seen.peak.memory_bytes, 3000);
  EXPECT_EQ(seen.interval_ms, 10000);
  EXPECT_EQ(seen.source, "process");
  EXPECT_GE(seen.seconds, 0.002);
  EXPECT_LT(seen.seconds, 1);
  EXPECT_EQ(shown.restarts, 1);
}

TEST(Observer, IntervalIsKept) {
  Shown shown;
  Observer observer(probe(shown), {.interval_ms = 20});
  shown.sleep_ms = 10;
  observer.begin();
  sleep_ms(1000);
  const Observation seen = observer.end();
  // Fifty; 33 if what a look takes were added to the interval.
  EXPECT_GE(seen.samples, 40);
  EXPECT_LE(seen.samples, static_cast<int64_t>(seen.seconds * 50) + 2);
}

TEST(Observer, PartsAsideAreNotSeen) {
  Shown shown;
  Observer observer(probe(shown), {.interval_ms = 5, .max_cost = 1});
  shown.bytes = 2000;
  observer.begin();
  sleep_ms(60);
  EXPECT_TRUE(observer.pause());
  const int before = shown.samples;
  shown.bytes = 90000;
  shown.utilisation = 100;
  sleep_ms(300);
  EXPECT_EQ(shown.samples, before) << "nobody looks meanwhile";
  shown.bytes = 2500;
  shown.utilisation = 50;
  EXPECT_EQ(shown.restarts, 1);
  EXPECT_TRUE(observer.resume());
  EXPECT_EQ(shown.restarts, 2);
  EXPECT_EQ(shown.samples, before + 1);
  sleep_ms(60);
  EXPECT_GT(shown.samples, before + 3) << "and then again";
  const Observation seen = observer.end();
  EXPECT_EQ(seen.peak.memory_bytes, 1500);
  EXPECT_EQ(seen.peak.utilisation, 50);
  EXPECT_GE(seen.seconds, 0.12);
  EXPECT_LT(seen.seconds, 0.3);
  EXPECT_LE(seen.series.t_s.back(), seen.seconds + 1e-9);
}

TEST(Observer, PauseAndResumeReportWhetherTheyChangeAnything) {
  Shown shown;
  Observer observer(probe(shown), {.interval_ms = 10000});
  EXPECT_FALSE(observer.pause()) << "before begin()";
  EXPECT_FALSE(observer.resume());
  observer.begin();
  EXPECT_TRUE(observer.pause());
  EXPECT_FALSE(observer.pause());
  sleep_ms(50);
  EXPECT_TRUE(observer.resume());
  EXPECT_FALSE(observer.resume());
  const Observation seen = observer.end();
  EXPECT_LT(seen.seconds, 0.04);
  EXPECT_EQ(seen.samples, 4);
}

TEST(Observer, EndMayComeWhileAside) {
  Shown shown;
  Observer observer(probe(shown), {.interval_ms = 10000});
  observer.begin();
  sleep_ms(20);
  observer.pause();
  sleep_ms(100);
  const Observation seen = observer.end();
  EXPECT_EQ(seen.samples, 2);
  EXPECT_GE(seen.seconds, 0.02);
  EXPECT_LT(seen.seconds, 0.09);
  EXPECT_EQ(observer.end().samples, 2);
  EXPECT_FALSE(observer.pause());
  EXPECT_FALSE(observer.resume());
}

TEST(Observer, EndAsksUntilNothingIsToCome) {
  Shown shown;
  shown.to_come = 3;
  shown.rest = {{0, 1000, 90}};  // outweighs the looks
  Observer observer(probe(shown), {.interval_ms = 10000});
  observer.begin();
  EXPECT_EQ(shown.stops, 0);
  observer.pause();
  EXPECT_EQ(shown.stops, 1);
  EXPECT_EQ(shown.asked, 0) << "only at the end";
  observer.resume();
  const auto start = Clock::now();
  const Observation seen = observer.end();
  EXPECT_GE(Clock::now() - start, std::chrono::milliseconds(60));
  EXPECT_EQ(shown.stops, 2);
  EXPECT_EQ(shown.asked, 4);
  EXPECT_EQ(seen.samples, 4);
  EXPECT_LT(seen.seconds, 0.05) << "waiting is no training";
  EXPECT_NEAR(seen.average.utilisation.value_or(0), 90, 0.1);
  observer.end();
  EXPECT_EQ(shown.asked, 4);
}

TEST(Observer, AProbeThatHasAllIsNotWaitedFor) {
  Observer observer("cpu");
  observer.begin();
  const auto start = Clock::now();
  observer.end();
  EXPECT_LT(Clock::now() - start, std::chrono::milliseconds(25));
}

TEST(Observer, WrongOrderIsAnError) {
  Shown shown;
  Observer observer(probe(shown));
  EXPECT_FALSE(observer.pause());
  EXPECT_FALSE(observer.resume());
  EXPECT_NE(testing::error_of([&] { observer.end(); }).find("begin()"),
            std::string::npos);
  observer.begin();
  EXPECT_NE(testing::error_of([&] { observer.begin(); }).find("once"),
            std::string::npos);
  observer.end();
  EXPECT_NE(testing::error_of([&] { observer.begin(); }).find("once"),
            std::string::npos);
  EXPECT_NE(testing::error_of([&] {
              Observer(probe(shown), {.interval_ms = 0});
            }).find("interval"),
            std::string::npos);
}

TEST(Observer, NoThreadIsLeft) {
  ASSERT_TRUE(observing_threads().empty());
  Shown shown;
  {
    Observer observer(probe(shown), {.interval_ms = 60000});
    EXPECT_TRUE(observing_threads().empty());
    observer.begin();
    sleep_ms(20);
    EXPECT_EQ(observing_threads().size(), 1U);
    const auto start = Clock::now();
    observer.end();
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(2))
        << "the interval is not waited for";
    EXPECT_TRUE(observing_threads().empty());
  }
  for (const bool aside : {false, true}) {
    Observer observer(probe(shown), {.interval_ms = 60000});
    observer.begin();
    if (aside) observer.pause();
  }
  EXPECT_TRUE(observing_threads().empty()) << "destroyed in the middle";
}

TEST(Observer, TheThreadGivesWayAndTakesNoSignals) {
  Shown shown;
  Observer observer(probe(shown));
  const int mine = getpriority(PRIO_PROCESS, 0);
  observer.begin();
  sleep_ms(50);
  const auto threads = observing_threads();
  ASSERT_EQ(threads.size(), 1U);
  EXPECT_GT(getpriority(PRIO_PROCESS, static_cast<id_t>(threads[0])), mine);
  EXPECT_EQ(getpriority(PRIO_PROCESS, 0), mine);
  std::ifstream status("/proc/self/task/" + std::to_string(threads[0]) +
                       "/status");
  uint64_t blocked = 0;
  for (std::string key; status >> key;) {
    if (key == "SigBlk:") status >> std::hex >> blocked;
    std::getline(status, key);
  }
  EXPECT_NE(blocked & (1U << (SIGINT - 1)), 0U);
  sigset_t here;
  pthread_sigmask(SIG_BLOCK, nullptr, &here);
  EXPECT_EQ(sigismember(&here, SIGINT), 0);
}

TEST(Observer, ADearProbeIsAskedLessOften) {
  Shown shown;
  shown.spin_us = 4000;  // 8 % of the interval
  Observer observer(probe(shown));
  observer.begin();
  sleep_ms(2000);
  const Observation seen = observer.end();
  // Both ends are looked at in any case: 8 ms of 20.
  EXPECT_LT(seen.cost, 0.016);
  EXPECT_GT(seen.cost, 0.006) << "the cost is measured";
  EXPECT_GE(seen.samples, 4);
  EXPECT_LE(seen.samples, 8);
}

TEST(Observer, AProbeThatThrowsShowsNothing) {
  Shown shown;
  Observer observer(probe(shown), {.interval_ms = 5});
  shown.throws = true;
  observer.begin();
  sleep_ms(30);
  const Observation seen = observer.end();
  EXPECT_GE(seen.samples, 2);
  EXPECT_FALSE(seen.peak.memory_bytes.has_value());
}

TEST(Observer, OfTheProcessItCostsLessThanOnePercent) {
  Observer observer("cpu");
  std::atomic<bool> stop{false};
  std::vector<std::thread> training;  // as many as there are cores
  for (unsigned i = 0; i < std::thread::hardware_concurrency(); ++i) {
    training.emplace_back([&stop] {
      while (!stop) {
      }
    });
  }
  observer.begin();
  sleep_ms(3000);
  const Observation seen = observer.end();
  stop = true;
  for (auto& thread : training) thread.join();
  EXPECT_LT(seen.cost, 0.01);
  EXPECT_GT(seen.cost, 0);
  // Sixty; on cores that are all busy some come late, none should starve.
  EXPECT_GE(seen.samples, 45);
  EXPECT_EQ(seen.source, "process");
  EXPECT_EQ(seen.interval_ms, 50);
}

}  // namespace
}  // namespace reprise
