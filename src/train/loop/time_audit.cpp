#include "train/loop/time_audit.h"

#include <fmt/format.h>

#include <fstream>
#include <sys/resource.h>

namespace reprise::detail {
namespace {

// Shares of the training time above which the time is considered misleading.
constexpr double kWaited = 0.2;
constexpr double kSystem = 0.25;
constexpr double kQueued = 0.15;
// Share of CPU time below which the process is considered idle, because a GPU
// did the work.
constexpr double kBusy = 0.1;
constexpr double kDenormals = 0.01;

double seconds_of(const timeval& time) {
  return static_cast<double>(time.tv_sec) +
         1e-6 * static_cast<double>(time.tv_usec);
}

TimeAudit::Usage usage_now() {
  TimeAudit::Usage usage;
  rusage process{};
  if (getrusage(RUSAGE_SELF, &process) == 0) {
    usage.user_s = seconds_of(process.ru_utime);
    usage.system_s = seconds_of(process.ru_stime);
  }
  // See proc(5): nanoseconds on a core, and nanoseconds waiting for one.
  std::ifstream schedule("/proc/thread-self/schedstat");
  double ran = 0, queued = 0;
  if (schedule >> ran >> queued) usage.queued_s = 1e-9 * queued;
  return usage;
}

}  // namespace

std::vector<std::string> time_doubts(const TimeAudit::Usage& used,
                                     const TimeAudit::Finding& finding) {
  std::vector<std::string> doubts;
  const double seconds = finding.seconds;
  if (seconds < TimeAudit::kShortestS) return doubts;
  const auto percent = [](double part, double whole) {
    return fmt::format("{:.0f} %", 100 * part / whole);
  };
  if (finding.waited_s > kWaited * seconds) {
    doubts.push_back(percent(finding.waited_s, seconds) +
                     " of it was spent waiting for data; try more --workers");
  }
  const double cpu_s = used.user_s + used.system_s;
  if (cpu_s > kBusy * seconds && used.system_s > kSystem * cpu_s) {
    doubts.push_back(percent(used.system_s, cpu_s) +
                     " of the processor time was the kernel's (page faults, "
                     "system calls)");
  }
  if (used.queued_s && *used.queued_s > kQueued * seconds) {
    doubts.push_back(percent(*used.queued_s, seconds) +
                     " of it the training waited for a processor core that "
                     "another program had");
  }
  if (finding.device.is_cpu() && finding.denormal_share > kDenormals) {
    doubts.push_back(percent(finding.denormal_share, 1) +
                     " of the gradients' values are denormal numbers, on which "
                     "arithmetic can be a hundred times slower");
  }
  return doubts;
}

void TimeAudit::start(double seconds, double waited_s) {
  started_ = true;
  seconds_ = seconds;
  waited_s_ = waited_s;
  usage_ = usage_now();
}

std::vector<std::string> TimeAudit::doubts(const Finding& finding) const {
  if (!started_) return {};
  Usage used = usage_now();
  used.user_s -= usage_.user_s;
  used.system_s -= usage_.system_s;
  if (used.queued_s && usage_.queued_s) *used.queued_s -= *usage_.queued_s;
  Finding since = finding;
  since.seconds -= seconds_;
  since.waited_s -= waited_s_;
  return time_doubts(used, since);
}

}  // namespace reprise::detail
