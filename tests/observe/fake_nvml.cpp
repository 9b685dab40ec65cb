// A fake NVML that returns the values set by a test. With FAKE_NVML_OLD, it lacks the
// functions that old drivers lack.
#include "fake_nvml.h"

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>

namespace {

FakeNvml state;

constexpr const char* kUuids[2] = {"GPU-aaaa0000-1111", "GPU-bbbb0000-2222"};
constexpr const char* kBuses[2] = {"00000000:1B:00.0", "00000000:43:00.0"};

int index_of(void* device) {
  return static_cast<int>(reinterpret_cast<intptr_t>(device)) - 1;
}
void* handle_of(int index) {
  return reinterpret_cast<void*>(static_cast<intptr_t>(index + 1));
}
unsigned long long total_of(int index) {
  return index == 0 ? 80000000000ULL : 79000000000ULL;
}
int put(char* text, unsigned size, const char* value) {
  if (std::strlen(value) + 1 > size) return 7;
  std::strcpy(text, value);
  return 0;
}
unsigned long long now_us() {
  timespec time{};
  clock_gettime(CLOCK_REALTIME, &time);
  return static_cast<unsigned long long>(time.tv_sec) * 1000000 +
         static_cast<unsigned long long>(time.tv_nsec) / 1000;
}
void spin(int microseconds) {
  const auto now = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return time.tv_sec * 1000000 + time.tv_nsec / 1000;
  };
  const auto until = now() + microseconds;
  while (now() < until) {
  }
}

}  // namespace

extern "C" {

FakeNvml* fake_nvml_state() {
  return &state;
}

int nvmlInit_v2() {
  if (state.init_error == 0) ++state.starts;
  return state.init_error;
}
int nvmlShutdown() {
  ++state.stops;
  return 0;
}
const char* nvmlErrorString(int code) {
  switch (code) {
    case 3:
      return "Not Supported";
    case 4:
      return "Insufficient Permissions";
    case 9:
      return "Driver Not Loaded";
    default:
      return "Unknown Error";
  }
}
int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  return put(text, size, "580.1.2");
}
int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = 2;
  return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  if (index >= 2) return 2;
  *device = handle_of(static_cast<int>(index));
  return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** device) {
  for (int i = 0; i < 2; ++i) {
    if (std::strcmp(bus, kBuses[i]) == 0) {
      *device = handle_of(i);
      return 0;
    }
  }
  return 6;
}
int nvmlDeviceGetUUID(void* device, char* text, unsigned size) {
  return put(text, size, kUuids[index_of(device)]);
}
int nvmlDeviceGetName(void* device, char* text, unsigned size) {
  if (state.name_error != 0) return state.name_error;
  return put(text, size, index_of(device) == 0 ? "Fake A" : "Fake B");
}
int nvmlDeviceGetMemoryInfo(void* device, unsigned long long* memory) {
  if (state.memory_error != 0) return state.memory_error;
  const int i = state.asked_device = index_of(device);
  memory[0] = total_of(i);
  memory[1] = total_of(i) - state.used[i];
  memory[2] = state.used[i];
  return 0;
}
int nvmlDeviceGetUtilizationRates(void*, unsigned* rates) {
  ++state.rate_calls;
  if (state.rate_error != 0) return state.rate_error;
  rates[0] = now_us() < state.later_us ? state.rate : state.later_rate;
  rates[1] = 7;
  return 0;
}
int nvmlDeviceGetPowerUsage(void*, unsigned* milliwatts) {
  ++state.power_calls;
  spin(state.spin_us);
  *milliwatts = state.milliwatts;
  return state.power_error;
}
int nvmlDeviceGetClockInfo(void*, int type, unsigned* mhz) {
  *mhz = type == 1 ? state.mhz : 9999;
  return state.clock_error;
}

#ifndef FAKE_NVML_OLD
// The layouts are repeated here from NVIDIA's documentation.
struct Memory2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};
struct Sample {
  unsigned long long time_us;
  union {
    double real;
    unsigned number;
    unsigned long long large;
  } value;
};

int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  for (int i = 0; i < 2; ++i) {
    if (std::strcmp(uuid, kUuids[i]) == 0) {
      *device = handle_of(i);
      return 0;
    }
  }
  return 6;
}
int nvmlDeviceGetNumGpuCores(void*, unsigned* cores) {
  *cores = 16896;
  return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void* device, Memory2* memory) {
  if (state.memory2_error != 0) return state.memory2_error;
  if (memory->version != 0x02000028) return 25;
  const int i = state.asked_device = index_of(device);
  memory->total = total_of(i);
  memory->reserved = 500000000;
  memory->used = state.used[i];
  memory->free = memory->total - memory->reserved - memory->used;
  return 0;
}
struct Field {
  unsigned id, scope;
  long long time_us, latency_us;
  int value_type, code;
  unsigned long long value;
};
int nvmlDeviceGetFieldValues(void*, int count, Field* fields) {
  for (int i = 0; i < count; ++i) {
    fields[i].code = fields[i].id == 186 ? state.instant_error : 2;
    fields[i].value_type = 1;
    fields[i].value = state.instant_milliwatts;
  }
  return 0;
}
int nvmlDeviceGetSamples(void*, int type, unsigned long long last_us,
                         int* value_type, unsigned* count, Sample* samples) {
  ++state.sample_calls;
  spin(state.samples_spin_us);
  if (state.samples_error != 0) return state.samples_error;
  if (type != 1) return 3;
  *value_type = 1;
  unsigned found = 0;
  bool full = false;
  const auto tell = [&](unsigned long long time_us, unsigned percent) {
    if (time_us <= last_us && !state.repeats) return;
    full = found == *count;
    if (full) return;
    samples[found].time_us = time_us;
    samples[found].value.large =
        ~0ULL;  // the other bytes of the union are arbitrary
    samples[found].value.number = percent;
    ++found;
  };
  for (unsigned i = 0; i < state.sample_count; ++i) {
    tell(state.first_sample_us + 1000ULL * i, state.samples[i]);
  }
  const unsigned long long now = now_us();
  for (unsigned i = 0; i < state.timed_count; ++i) {
    const FakeNvml::Timed& timed = state.timed[i];
    if (timed.told_us <= now) tell(timed.stamp_us, timed.percent);
  }
  if (full) return 7;
  *count = found;
  return found == 0 ? 6 : 0;
}
#endif

}  // extern "C"
