#include "base/limits.h"

#include "support.h"
#include "temporary.h"

#include <fstream>
#include <sys/stat.h>

namespace reprise {
namespace {

/// Simulated /proc and /sys.
class FakeSystem {
 public:
  FakeSystem() { write("/proc/meminfo", "MemFree: 5 kB\nMemTotal: 4000 kB\n"); }

  void write(const std::string& path, const std::string& text) {
    for (size_t at = path.find('/', 1); at != std::string::npos;
         at = path.find('/', at + 1)) {
      mkdir((root() + path.substr(0, at)).c_str(), 0700);
    }
    std::ofstream(root() + path) << text;
  }
  const std::string& root() const { return directory_.path(); }
  ProcessLimits limits() const { return process_limits(root()); }

 private:
  testing::TemporaryDirectory directory_;
};

TEST(Limits, MachineIsTheLimitWithoutCgroups) {
  const FakeSystem system;
  EXPECT_EQ(system.limits().memory_bytes, 4000 * 1024);
  EXPECT_EQ(system.limits().cores, process_limits("/nowhere").cores);
  EXPECT_EQ(process_limits("/nowhere").memory_bytes, 0);
}

TEST(Limits, ThisMachineIsPlausible) {
  EXPECT_GE(process_limits().cores, 1);
  EXPECT_GT(process_limits().memory_bytes, int64_t{1} << 28);
  EXPECT_LT(process_limits().memory_bytes, int64_t{1} << 50);
}

TEST(Limits, CgroupVersion2LimitsMemoryAndCores) {
  FakeSystem system;
  system.write("/proc/self/cgroup", "0::/a/b\n");
  system.write("/sys/fs/cgroup/a/b/memory.max", "max\n");
  system.write("/sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  EXPECT_EQ(system.limits().memory_bytes, 4000 * 1024);
  EXPECT_EQ(system.limits().cores, process_limits("/nowhere").cores);
  system.write("/sys/fs/cgroup/a/b/memory.max", "2000000\n");
  system.write("/sys/fs/cgroup/a/b/cpu.max", "50000 100000\n");
  EXPECT_EQ(system.limits().memory_bytes, 2000000);
  EXPECT_EQ(system.limits().cores, 1);
  // A parent group may have a lower limit.
  system.write("/sys/fs/cgroup/a/memory.max", "1000000\n");
  EXPECT_EQ(system.limits().memory_bytes, 1000000);
  // A limit above the machine's memory has no effect.
  system.write("/sys/fs/cgroup/a/memory.max", "max\n");
  system.write("/sys/fs/cgroup/a/b/memory.max", "9000000000\n");
  EXPECT_EQ(system.limits().memory_bytes, 4000 * 1024);
}

TEST(Limits, CgroupVersion1LimitsMemoryAndCores) {
  FakeSystem system;
  system.write("/proc/self/cgroup", "4:memory:/x\n3:cpu,cpuacct:/y\n0::/\n");
  system.write("/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "3000000\n");
  system.write("/sys/fs/cgroup/cpu/y/cpu.cfs_quota_us", "-1\n");
  system.write("/sys/fs/cgroup/cpu/y/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(system.limits().memory_bytes, 3000000);
  EXPECT_EQ(system.limits().cores, process_limits("/nowhere").cores);
  system.write("/sys/fs/cgroup/cpu/y/cpu.cfs_quota_us", "90000\n");
  EXPECT_EQ(system.limits().cores, 1);
}

TEST(Limits, ContainerSeesItsGroupAsTheRoot) {
  FakeSystem system;
  system.write("/proc/self/cgroup", "0::/docker/0123\n");
  system.write("/sys/fs/cgroup/memory.max", "1500000\n");
  EXPECT_EQ(system.limits().memory_bytes, 1500000);
}

TEST(Limits, FractionalCoresAreRoundedUp) {
  if (process_limits("/nowhere").cores < 2) GTEST_SKIP() << "one core";
  FakeSystem system;
  system.write("/proc/self/cgroup", "0::/\n");
  system.write("/sys/fs/cgroup/cpu.max", "150000 100000\n");
  EXPECT_EQ(system.limits().cores, 2);
  system.write("/sys/fs/cgroup/cpu.max", "100000 100000\n");
  EXPECT_EQ(system.limits().cores, 1);
}

}  // namespace
}  // namespace reprise
