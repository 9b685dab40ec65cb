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

/// State shared between a test and its probe, which the observer owns.
struct ProbeState {
  std::atomic<int64_t> bytes{1000};
  std::atomic<double> utilisation{50};
  std::atomic<int> samples{0}, restarts{0};
  std::atomic<int> spin_us{0}, sleep_ms{0};  ///< duration of sample()
  std::atomic<bool> throws{false};
  std::atomic<int> stops{0}, polls{0};
  std::atomic<int> pending{0};  ///< calls of has_pending() that return true
  std::vector<PastUtilisation> past;  ///< returned by take_pending()
  std::vector<int64_t> script;        ///< memory of the first samples
};

class FakeProbe : public DeviceProbe {
 public:
  explicit FakeProbe(ProbeState& state) : state_(state) {}
  std::string source() const override { return "process"; }
  void restart() override { ++state_.restarts; }
  void stop() override { ++state_.stops; }
  bool has_pending() override {
    ++state_.polls;
    return state_.pending-- > 0;
  }
  std::vector<PastUtilisation> take_pending() override { return state_.past; }
  ProbeAvailability availability() override { return {}; }
  DeviceSample sample() override {
    const auto number = static_cast<size_t>(state_.samples++);
    if (state_.throws) throw std::runtime_error("no");
    if (state_.sleep_ms > 0) sleep_ms(state_.sleep_ms);
    timespec start{}, now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &start);
    do {
      clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    } while ((now.tv_sec - start.tv_sec) * 1000000 +
                 (now.tv_nsec - start.tv_nsec) / 1000 <
             state_.spin_us);
    DeviceSample sample;
    sample.memory_bytes = number < state_.script.size() ? state_.script[number]
                                                        : state_.bytes.load();
    sample.utilisation = state_.utilisation;
    return sample;
  }

 private:
  ProbeState& state_;
};

std::unique_ptr<DeviceProbe> probe(ProbeState& state) {
  return std::make_unique<FakeProbe>(state);
}

/// The ids of the observer threads of this process.
std::vector<int> observer_threads() {
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
  ProbeState state;
  state.script = {5000, 1000, 1200, 1100, 0};
  Observer observer(probe(state));
  EXPECT_EQ(state.samples, 5);
  state.bytes = 1600;
  observer.begin();
  const Observation observed = observer.end();
  EXPECT_EQ(observed.baseline_bytes, 1100);
  EXPECT_EQ(observed.peak.memory_bytes, 500);
}

TEST(Observer, BaselineCanBeTakenAgain) {
  ProbeState state;
  Observer observer(probe(state));
  state.bytes = 3000;
  observer.take_baseline();
  observer.begin();
  EXPECT_NE(testing::error_of([&] {
              observer.take_baseline();
            }).find("before begin()"),
            std::string::npos);
  EXPECT_EQ(observer.end().baseline_bytes, 3000);
}

TEST(Observer, SamplesAShortIntervalAtBothEnds) {
  ProbeState state;
  Observer observer(probe(state), {.interval_ms = 10000});
  state.bytes = 1500;
  observer.begin();
  state.bytes = 4000;
  sleep_ms(2);
  const Observation observed = observer.end();
  EXPECT_EQ(observed.samples, 2);
  EXPECT_EQ(observed.series.memory_bytes, (std::vector<int64_t>{500, 3000}));
  EXPECT_EQ(observed.peak.memory_bytes, 3000);
  EXPECT_EQ(observed.interval_ms, 10000);
  EXPECT_EQ(observed.source, "process");
  EXPECT_GE(observed.seconds, 0.002);
  EXPECT_LT(observed.seconds, 1);
  EXPECT_EQ(state.restarts, 1);
}

TEST(Observer, KeepsTheSamplingInterval) {
  ProbeState state;
  Observer observer(probe(state), {.interval_ms = 20});
  state.sleep_ms = 10;
  observer.begin();
  sleep_ms(1000);
  const Observation observed = observer.end();
  // 50 samples; 33 if the duration of a sample were added to the interval.
  EXPECT_GE(observed.samples, 40);
  EXPECT_LE(observed.samples, static_cast<int64_t>(observed.seconds * 50) + 2);
}

TEST(Observer, ExcludesPausedIntervals) {
  ProbeState state;
  Observer observer(probe(state), {.interval_ms = 5, .max_cost = 1});
  state.bytes = 2000;
  observer.begin();
  sleep_ms(60);
  EXPECT_TRUE(observer.pause());
  const int before = state.samples;
  state.bytes = 90000;
  state.utilisation = 100;
  sleep_ms(300);
  EXPECT_EQ(state.samples, before) << "no sample while paused";
  state.bytes = 2500;
  state.utilisation = 50;
  EXPECT_EQ(state.restarts, 1);
  EXPECT_TRUE(observer.resume());
  EXPECT_EQ(state.restarts, 2);
  EXPECT_EQ(state.samples, before + 1);
  sleep_ms(60);
  EXPECT_GT(state.samples, before + 3) << "sampling continues";
  const Observation observed = observer.end();
  EXPECT_EQ(observed.peak.memory_bytes, 1500);
  EXPECT_EQ(observed.peak.utilisation, 50);
  EXPECT_GE(observed.seconds, 0.12);
  EXPECT_LT(observed.seconds, 0.3);
  EXPECT_LE(observed.series.t_s.back(), observed.seconds + 1e-9);
}

TEST(Observer, PauseAndResumeReportWhetherTheyHadAnEffect) {
  ProbeState state;
  Observer observer(probe(state), {.interval_ms = 10000});
  EXPECT_FALSE(observer.pause()) << "not started";
  observer.begin();
  EXPECT_TRUE(observer.pause());
  EXPECT_FALSE(observer.pause()) << "already paused";
  sleep_ms(50);
  EXPECT_TRUE(observer.resume());
  EXPECT_FALSE(observer.resume()) << "not paused";
  const Observation observed = observer.end();
  EXPECT_LT(observed.seconds, 0.04);
  EXPECT_EQ(observed.samples, 4);
}

TEST(Observer, EndsWhilePaused) {
  ProbeState state;
  Observer observer(probe(state), {.interval_ms = 10000});
  observer.begin();
  sleep_ms(20);
  observer.pause();
  sleep_ms(100);
  const Observation observed = observer.end();
  EXPECT_EQ(observed.samples, 2);
  EXPECT_GE(observed.seconds, 0.02);
  EXPECT_LT(observed.seconds, 0.09);
  EXPECT_EQ(observer.end().samples, 2);
  EXPECT_FALSE(observer.pause());
  EXPECT_FALSE(observer.resume());
}

TEST(Observer, EndPollsUntilNothingIsPending) {
  ProbeState state;
  state.pending = 3;
  state.past = {{0, 1000, 90}};  // outweighs the samples
  Observer observer(probe(state), {.interval_ms = 10000});
  observer.begin();
  EXPECT_EQ(state.stops, 0);
  observer.pause();
  EXPECT_EQ(state.stops, 1);
  EXPECT_EQ(state.polls, 0) << "only at the end";
  observer.resume();
  const auto start = Clock::now();
  const Observation observed = observer.end();
  EXPECT_GE(Clock::now() - start, std::chrono::milliseconds(60));
  EXPECT_EQ(state.stops, 2);
  EXPECT_EQ(state.polls, 4);
  EXPECT_EQ(observed.samples, 4);
  EXPECT_LT(observed.seconds, 0.05) << "waiting is not training time";
  EXPECT_NEAR(observed.average.utilisation.value_or(0), 90, 0.1);
  observer.end();
  EXPECT_EQ(state.polls, 4);
}

TEST(Observer, DoesNotWaitForAProbeWithoutDelay) {
  Observer observer("cpu");
  observer.begin();
  const auto start = Clock::now();
  observer.end();
  EXPECT_LT(Clock::now() - start, std::chrono::milliseconds(25));
}

TEST(Observer, RejectsCallsInTheWrongOrder) {
  ProbeState state;
  Observer observer(probe(state));
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
              Observer(probe(state), {.interval_ms = 0});
            }).find("interval"),
            std::string::npos);
}

TEST(Observer, LeavesNoThreadBehind) {
  ASSERT_TRUE(observer_threads().empty());
  ProbeState state;
  {
    Observer observer(probe(state), {.interval_ms = 60000});
    EXPECT_TRUE(observer_threads().empty());
    observer.begin();
    sleep_ms(20);
    EXPECT_EQ(observer_threads().size(), 1U);
    const auto start = Clock::now();
    observer.end();
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(2))
        << "end() does not wait for the interval";
    EXPECT_TRUE(observer_threads().empty());
  }
  for (const bool aside : {false, true}) {
    Observer observer(probe(state), {.interval_ms = 60000});
    observer.begin();
    if (aside) observer.pause();
  }
  EXPECT_TRUE(observer_threads().empty()) << "destroyed during an observation";
}

TEST(Observer, ThreadHasLowPriorityAndBlocksSignals) {
  ProbeState state;
  Observer observer(probe(state));
  const int mine = getpriority(PRIO_PROCESS, 0);
  observer.begin();
  sleep_ms(50);
  const auto threads = observer_threads();
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

TEST(Observer, SamplesAnExpensiveProbeLessOften) {
  ProbeState state;
  state.spin_us = 4000;  // 8 % of the interval
  Observer observer(probe(state));
  observer.begin();
  sleep_ms(2000);
  const Observation observed = observer.end();
  // Both ends are always sampled: 8 of 20 ms.
  EXPECT_LT(observed.cost, 0.016);
  EXPECT_GT(observed.cost, 0.006) << "the cost is measured";
  EXPECT_GE(observed.samples, 4);
  EXPECT_LE(observed.samples, 8);
}

TEST(Observer, IgnoresAProbeThatThrows) {
  ProbeState state;
  Observer observer(probe(state), {.interval_ms = 5});
  state.throws = true;
  observer.begin();
  sleep_ms(30);
  const Observation observed = observer.end();
  EXPECT_GE(observed.samples, 2);
  EXPECT_FALSE(observed.peak.memory_bytes.has_value());
}

TEST(Observer, ObservingTheProcessCostsLessThanOnePercent) {
  Observer observer("cpu");
  std::atomic<bool> stop{false};
  std::vector<std::thread> training;  // one per core
  for (unsigned i = 0; i < std::thread::hardware_concurrency(); ++i) {
    training.emplace_back([&stop] {
      while (!stop) {
      }
    });
  }
  observer.begin();
  sleep_ms(3000);
  const Observation observed = observer.end();
  stop = true;
  for (auto& thread : training) thread.join();
  EXPECT_LT(observed.cost, 0.01);
  EXPECT_GT(observed.cost, 0);
  // 60 samples; some may be late because all cores are busy.
  EXPECT_GE(observed.samples, 45);
  EXPECT_EQ(observed.source, "process");
  EXPECT_EQ(observed.interval_ms, 50);
}

}  // namespace
}  // namespace reprise
