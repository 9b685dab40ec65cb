#include "base/memory_limit.h"

#include "base/paths.h"
#include "base/text_check.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <string>
#include <sys/resource.h>

namespace reprise {

int64_t memory_limit_from_environment() {
  const std::string text = environment_variable(kMemoryLimitVariable);
  const auto check = whole_number(1, std::numeric_limits<int64_t>::max());
  return check(text).empty() ? std::strtoll(text.c_str(), nullptr, 10) : 0;
}

int64_t limited_memory_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string key; status >> key;) {
    int64_t kib = 0;
    if (key == "VmData:" && status >> kib) return kib * 1024;
    std::getline(status, key);
  }
  return 0;
}

void limit_memory(int64_t bytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_DATA, &limit) != 0) return;
  limit.rlim_cur = std::min<rlim_t>(static_cast<rlim_t>(bytes), limit.rlim_max);
  setrlimit(RLIMIT_DATA, &limit);
}

}  // namespace reprise
