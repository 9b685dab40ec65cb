#include "base/limits.h"
#include "sleep.h"
#include "support.h"

#include <reprise/observe/observer.h>
#include <reprise/observe/probe.h>

#include <chrono>
#include <cstring>
#include <sys/mman.h>
#include <sys/resource.h>
#include <thread>

namespace reprise {
namespace {

using testing::sleep_ms;

constexpr int64_t kMb = 1000000;

/// CPU time from another source than the probe's.
double process_cpu_s() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  return static_cast<double>(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
         1e-6 *
             static_cast<double>(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
}

/// Memory from mmap, which is returned to the system by the destructor.
class Block {
 public:
  explicit Block(size_t bytes)
      : bytes_(bytes),
        data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    std::memset(data_, 1, bytes);
  }
  ~Block() { munmap(data_, bytes_); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

 private:
  size_t bytes_;
  void* data_;
};

TEST(ProcessProbe, ReportsMemoryChanges) {
  const auto probe = make_probe("cpu");
  EXPECT_EQ(probe->source(), "process");
  const auto before = probe->sample().memory_bytes;
  ASSERT_TRUE(before.has_value());
  {
    const Block block(200 * kMb);
    const auto during = probe->sample().memory_bytes;
    ASSERT_TRUE(during.has_value());
    EXPECT_NEAR(static_cast<double>(*during - *before), 200.0 * kMb,
                0.05 * 200 * kMb);
  }
  const auto after = probe->sample().memory_bytes;
  EXPECT_NEAR(static_cast<double>(*after - *before), 0, 10.0 * kMb);
}

TEST(ProcessProbe, ObserverFindsAPeakBetweenTheEnds) {
  Observer observer("cpu", {.interval_ms = 10});
  observer.begin();
  {
    const Block block(200 * kMb);
    sleep_ms(200);
  }
  sleep_ms(200);
  const Observation observed = observer.end();
  ASSERT_TRUE(observed.peak.memory_bytes && observed.average.memory_bytes);
  EXPECT_NEAR(static_cast<double>(*observed.peak.memory_bytes), 200.0 * kMb,
              0.05 * 200 * kMb);
  EXPECT_LT(*observed.average.memory_bytes, 180 * kMb);
  EXPECT_GT(*observed.average.memory_bytes, 50 * kMb);
  EXPECT_LT(observed.series.memory_bytes.back(), 20 * kMb);
}

TEST(ProcessProbe, ABusyThreadUsesOneCore) {
  const auto probe = make_probe("cpu");
  const double cores = process_limits().cores;
  probe->restart();
  const auto start = std::chrono::steady_clock::now();
  const double cpu_before = process_cpu_s();
  double wall_s = 0;
  do {
    wall_s =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
            .count();
  } while (wall_s < 0.5);
  const auto busy = probe->sample().utilisation;
  const double used_s = process_cpu_s() - cpu_before;
  ASSERT_TRUE(busy.has_value());
  // Other processes may have used the core most of the time.
  EXPECT_NEAR(*busy, 100 * used_s / wall_s / cores, 2);
  EXPECT_GT(*busy, 10 / cores);
  EXPECT_LT(*busy, 115 / cores);

  sleep_ms(500);
  const auto idle = probe->sample().utilisation;
  ASSERT_TRUE(idle.has_value());
  EXPECT_LT(*idle, 10) << "measured since the previous sample";
}

TEST(ProcessProbe, RestartResetsUtilisation) {
  const auto probe = make_probe("cpu");
  const auto until =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(200);
  while (std::chrono::steady_clock::now() < until) {
  }
  probe->restart();
  sleep_ms(200);
  EXPECT_LT(probe->sample().utilisation.value_or(100), 10);
}

TEST(ProcessProbe, SamplesEveryAvailableValue) {
  const auto probe = make_probe("cpu");
  const ProbeAvailability availability = probe->availability();
  probe->restart();
  sleep_ms(20);
  const DeviceSample sample = probe->sample();
  EXPECT_TRUE(availability.memory.available);
  EXPECT_TRUE(availability.utilisation.available);
  EXPECT_EQ(availability.memory.available, sample.memory_bytes.has_value());
  EXPECT_EQ(availability.utilisation.available, sample.utilisation.has_value());
  EXPECT_EQ(availability.power.available, sample.power_w.has_value());
  EXPECT_EQ(availability.clock.available, sample.clock_mhz.has_value());
  for (const Availability& value : {availability.power, availability.clock}) {
    EXPECT_EQ(value.available, value.reason.empty());
  }
  if (sample.clock_mhz) {
    EXPECT_GT(*sample.clock_mhz, 100);
    EXPECT_LT(*sample.clock_mhz, 10000);
  }
}

}  // namespace
}  // namespace reprise
