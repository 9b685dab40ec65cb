#include "base/limits.h"
#include "observe/clocks.h"
#include "observe/probes.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sched.h>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

namespace reprise::detail {
namespace {

/// A file in /proc or /sys that is opened once and read repeatedly.
class SystemFile {
 public:
  SystemFile() = default;
  explicit SystemFile(const std::string& path)
      : file_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}
  ~SystemFile() {
    if (file_ >= 0) close(file_);
  }
  SystemFile(SystemFile&& other) noexcept
      : file_(std::exchange(other.file_, -1)) {}
  SystemFile& operator=(SystemFile&& other) noexcept {
    std::swap(file_, other.file_);
    return *this;
  }

  /// The number in field `field` of the text, counted from 0.
  std::optional<int64_t> number(int field = 0) const {
    char text[128];
    const ssize_t size =
        file_ < 0 ? -1 : pread(file_, text, sizeof(text) - 1, 0);
    if (size <= 0) return std::nullopt;
    text[size] = '\0';
    const char* at = text;
    for (int i = 0;; ++i) {
      char* end = nullptr;
      const long long value = std::strtoll(at, &end, 10);
      if (end == at) return std::nullopt;
      if (i == field) return value;
      at = end;
    }
  }

 private:
  int file_ = -1;
};

/// The energy counter of one processor package, which wraps around.
struct EnergyCounter {
  SystemFile file;
  int64_t range_uj = 0;
  int64_t last_uj = 0;
};

std::vector<EnergyCounter> energy_counters() {
  std::vector<EnergyCounter> counters;
  // One zone per socket; nested zones ("intel-rapl:0:1") are included in it.
  for (int socket = 0; socket < 16; ++socket) {
    const std::string at =
        "/sys/class/powercap/intel-rapl:" + std::to_string(socket);
    char name[32] = {};
    const int file = open((at + "/name").c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) break;
    const ssize_t size = read(file, name, sizeof(name) - 1);
    close(file);
    // "psys" covers the whole machine and includes the sockets.
    if (size < 7 || std::strncmp(name, "package", 7) != 0) continue;
    EnergyCounter counter{SystemFile(at + "/energy_uj")};
    const auto range = SystemFile(at + "/max_energy_range_uj").number();
    const auto now = counter.file.number();
    if (!now || !range) continue;
    counter.range_uj = *range;
    counter.last_uj = *now;
    counters.push_back(std::move(counter));
  }
  return counters;
}

/// The clock files of up to eight cores that the process may use, enough for a mean.
std::vector<SystemFile> clock_files() {
  std::vector<SystemFile> files;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) CPU_SET(0, &set);
  for (int core = 0; core < CPU_SETSIZE && files.size() < 8; ++core) {
    if (!CPU_ISSET(core, &set)) continue;
    SystemFile file("/sys/devices/system/cpu/cpu" + std::to_string(core) +
                    "/cpufreq/scaling_cur_freq");
    if (file.number()) files.push_back(std::move(file));
  }
  return files;
}

/// The mean of "cpu MHz : 2596.140" in /proc/cpuinfo, used if /sys has no clocks. Reads
/// the first 64 KiB, about forty cores.
std::optional<double> clock_of_cpuinfo() {
  const int file = open("/proc/cpuinfo", O_RDONLY | O_CLOEXEC);
  if (file < 0) return std::nullopt;
  std::string text(64 << 10, '\0');
  size_t size = 0;
  while (size < text.size()) {
    const ssize_t more = read(file, text.data() + size, text.size() - size);
    if (more <= 0) break;
    size += static_cast<size_t>(more);
  }
  close(file);
  text.resize(size);
  double sum = 0;
  int count = 0;
  for (size_t at = text.find("cpu MHz"); at != std::string::npos;
       at = text.find("cpu MHz", at + 1)) {
    const size_t colon = text.find(':', at);
    if (colon == std::string::npos) break;
    const double mhz = std::strtod(text.c_str() + colon + 1, nullptr);
    if (mhz > 0) {
      sum += mhz;
      ++count;
    }
  }
  if (count == 0) return std::nullopt;
  return sum / count;
}

/// Minimum time over which utilisation and power are computed.
constexpr double kShortest_s = 1e-3;
/// Minimum time between clock reads; some kernels interrupt every core for them.
constexpr double kClockEvery_s = 1;

class ProcessProbe final : public DeviceProbe {
 public:
  ProcessProbe() { ProcessProbe::restart(); }

  std::string source() const override { return "process"; }

  void restart() override {
    const double now_s = steady_seconds();
    cpu_s_ = cpu_seconds(CLOCK_PROCESS_CPUTIME_ID);
    cpu_at_s_ = now_s;
    read_energy();
    energy_at_s_ = now_s;
    clock_limiter_.reset();
  }

  DeviceSample sample() override {
    const double now_s = steady_seconds();
    return {memory(), utilisation(now_s), power(now_s), clock(now_s)};
  }

  ProbeAvailability availability() override {
    ProbeAvailability availability;
    availability.memory = {memory().has_value(), ""};
    if (!availability.memory.available)
      availability.memory.reason = "no /proc/self/statm";
    availability.utilisation = {true, ""};
    availability.power = {!counters_.empty(), ""};
    if (counters_.empty()) {
      availability.power.reason =
          access("/sys/class/powercap/intel-rapl:0", F_OK) == 0
              ? "only root may read the energy counters (RAPL)"
              : "no energy counters (RAPL)";
    }
    availability.clock = {read_clock().has_value(), ""};
    if (!availability.clock.available)
      availability.clock.reason = "the system reports no clock";
    return availability;
  }

 private:
  std::optional<int64_t> memory() const {
    const auto pages = memory_file_.number(1);
    if (!pages) return std::nullopt;
    return *pages * page_bytes_;
  }

  std::optional<double> utilisation(double now_s) {
    const double wall_s = now_s - cpu_at_s_;
    if (wall_s < kShortest_s) return std::nullopt;
    // Like utime + stime in /proc/self/stat, which have a resolution of 10 ms only.
    const double cpu_s = cpu_seconds(CLOCK_PROCESS_CPUTIME_ID);
    const double used = 100 * (cpu_s - cpu_s_) / (wall_s * cores_);
    cpu_s_ = cpu_s;
    cpu_at_s_ = now_s;
    return std::clamp(used, 0.0, 100.0);
  }

  /// Microjoules since the previous call.
  double read_energy() {
    double sum_uj = 0;
    for (EnergyCounter& counter : counters_) {
      const auto now = counter.file.number();
      if (!now) continue;
      int64_t used = *now - counter.last_uj;
      if (used < 0) used += counter.range_uj;
      counter.last_uj = *now;
      sum_uj += static_cast<double>(used);
    }
    return sum_uj;
  }

  std::optional<double> power(double now_s) {
    const double wall_s = now_s - energy_at_s_;
    if (counters_.empty() || wall_s < kShortest_s) return std::nullopt;
    const double watts = 1e-6 * read_energy() / wall_s;
    energy_at_s_ = now_s;
    return watts;
  }

  std::optional<double> read_clock() const {
    double khz = 0;
    int count = 0;
    for (const SystemFile& file : clock_files_) {
      if (const auto value = file.number()) {
        khz += static_cast<double>(*value);
        ++count;
      }
    }
    if (count > 0) return khz / count / 1000;
    return clock_of_cpuinfo();
  }

  std::optional<double> clock(double now_s) {
    if (!clock_limiter_.due(now_s)) return std::nullopt;
    const double before = cpu_seconds(CLOCK_THREAD_CPUTIME_ID);
    const auto mhz = read_clock();
    clock_limiter_.record(now_s, cpu_seconds(CLOCK_THREAD_CPUTIME_ID) - before);
    return mhz;
  }

  const int64_t page_bytes_ = sysconf(_SC_PAGESIZE);
  const int cores_ = process_limits().cores;
  const SystemFile memory_file_{"/proc/self/statm"};
  const std::vector<SystemFile> clock_files_ = clock_files();
  std::vector<EnergyCounter> counters_ = energy_counters();
  RateLimiter clock_limiter_{kClockEvery_s};
  double cpu_s_ = 0, cpu_at_s_ = 0, energy_at_s_ = 0;
};

}  // namespace

std::unique_ptr<DeviceProbe> make_process_probe() {
  return std::make_unique<ProcessProbe>();
}

}  // namespace reprise::detail
