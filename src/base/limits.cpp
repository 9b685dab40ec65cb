#include "base/limits.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <optional>
#include <sched.h>
#include <sstream>
#include <thread>
#include <vector>

namespace reprise {
namespace {

/// The number in a file; nullopt if the file says "max" or does not exist.
std::optional<int64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  int64_t value = 0;
  if (!(file >> value)) return std::nullopt;
  return value;
}

int cores_by_affinity() {
  cpu_set_t set;
  CPU_ZERO(&set);
  // Fails on machines with more cores than cpu_set_t holds.
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int64_t memory_of_machine(const std::string& root) {
  std::ifstream info(root + "/proc/meminfo");
  for (std::string key; info >> key;) {
    int64_t kib = 0;
    if (key == "MemTotal:" && info >> kib) return kib * 1024;
    std::getline(info, key);
  }
  return 0;
}

/// `path`, its parents, and "": inside a container the group is often mounted as the root
/// of the tree, although /proc shows its full path.
std::vector<std::string> group_and_parents(std::string path) {
  std::vector<std::string> result;
  while (!path.empty() && path != "/") {
    result.push_back(path);
    path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  }
  result.emplace_back();
  return result;
}

struct GroupLimits {
  std::optional<int64_t> memory_bytes;
  std::optional<double> cores;

  void memory(std::optional<int64_t> bytes) {
    if (bytes && *bytes > 0) {
      memory_bytes = std::min(*bytes, memory_bytes.value_or(*bytes));
    }
  }
  void quota(std::optional<int64_t> quota_us,
             std::optional<int64_t> period_us) {
    if (!quota_us || !period_us || *quota_us <= 0 || *period_us <= 0) return;
    const double value =
        static_cast<double>(*quota_us) / static_cast<double>(*period_us);
    cores = std::min(value, cores.value_or(value));
  }
};

/// Parses a line of /proc/self/cgroup: number:controllers:path; 0::path is version 2.
void read_group(const std::string& root, const std::string& line,
                GroupLimits& limits) {
  const size_t first = line.find(':');
  const size_t second = line.find(':', first + 1);
  if (first == std::string::npos || second == std::string::npos) return;
  const std::string number = line.substr(0, first);
  const std::string names = line.substr(first + 1, second - first - 1);
  const std::string tree = root + "/sys/fs/cgroup";
  for (const auto& group : group_and_parents(line.substr(second + 1))) {
    if (number == "0" && names.empty()) {
      const std::string at = tree + group;
      limits.memory(number_in(at + "/memory.max"));
      std::ifstream file(at + "/cpu.max");  // "150000 100000" or "max 100000"
      int64_t quota_us = 0, period_us = 0;
      if (file >> quota_us >> period_us) limits.quota(quota_us, period_us);
      continue;
    }
    std::istringstream list(names);
    for (std::string name; std::getline(list, name, ',');) {
      const std::string at = tree + "/" + name + group;
      if (name == "memory") {
        limits.memory(number_in(at + "/memory.limit_in_bytes"));
      } else if (name == "cpu") {
        limits.quota(number_in(at + "/cpu.cfs_quota_us"),
                     number_in(at + "/cpu.cfs_period_us"));
      }
    }
  }
}

}  // namespace

ProcessLimits process_limits(const std::string& root) {
  ProcessLimits limits;
  limits.cores = cores_by_affinity();
  limits.memory_bytes = memory_of_machine(root);
  GroupLimits group;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    read_group(root, line, group);
  }
  if (group.cores) {
    limits.cores = std::clamp(static_cast<int>(std::ceil(*group.cores - 1e-9)),
                              1, limits.cores);
  }
  if (group.memory_bytes) {
    limits.memory_bytes =
        limits.memory_bytes > 0
            ? std::min(limits.memory_bytes, *group.memory_bytes)
            : *group.memory_bytes;
  }
  return limits;
}

}  // namespace reprise
