#include "compat/cuda.h"

#include <reprise/memory/meter.h>

#include <fstream>
#include <string>

namespace reprise {

ProcessMemory process_memory() {
  ProcessMemory memory;
  std::ifstream status("/proc/self/status");
  for (std::string key; status >> key;) {
    int64_t kib = 0;
    if (key == "VmHWM:" && status >> kib) memory.rss_peak = kib * 1024;
    if (key == "VmRSS:" && status >> kib) memory.rss = kib * 1024;
    std::getline(status, key);
  }
  return memory;
}

int64_t available_memory() {
  std::ifstream info("/proc/meminfo");
  for (std::string key; info >> key;) {
    int64_t kib = 0;
    if (key == "MemAvailable:" && info >> kib) return kib * 1024;
    std::getline(info, key);
  }
  return 0;
}

int64_t available_memory(c10::Device device) {
  return device.is_cuda() ? compat::cuda_device_memory(device.index()).free
                          : available_memory();
}

bool reset_process_peak() {
  std::ofstream refs("/proc/self/clear_refs");
  refs << "5" << std::flush;  // proc(5): resets VmHWM to the current VmRSS
  return refs.good();
}

}  // namespace reprise
