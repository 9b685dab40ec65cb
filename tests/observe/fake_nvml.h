#pragma once

/// The state of the fake NVML (fake_nvml.cpp), set by tests. There are two devices of
/// 80 GB; the second one is slightly smaller and has another bus id.
struct FakeNvml {
  unsigned long long used[2] = {1000000000, 2000000000};
  unsigned rate = 40;  ///< percent
  unsigned milliwatts = 350500;
  unsigned mhz = 1755;
  /// Utilisation samples in the driver's buffer, one per millisecond, starting at 1001.
  unsigned samples[64] = {};
  unsigned sample_count = 0;
  unsigned long long first_sample_us = 1001;
  /// Further samples with their timestamps and the times from which on the driver
  /// returns them, in microseconds since the epoch.
  struct Timed {
    unsigned long long stamp_us = 0, told_us = 0;
    unsigned percent = 0;
  } timed[64] = {};
  unsigned timed_count = 0;
  /// The rate from a given time on.
  unsigned later_rate = 0;
  unsigned long long later_us = ~0ULL;
  unsigned instant_milliwatts = 123000;
  bool repeats = false;   ///< always return the whole buffer
  int asked_device = -1;  ///< device of the last memory query
  int starts = 0, stops = 0;
  int rate_calls = 0, sample_calls = 0, power_calls = 0;
  int spin_us = 0;  ///< CPU time of a power query
  int samples_spin_us = 0;

  /// Error codes that the functions return; 0: success.
  int init_error = 0, memory_error = 0, memory2_error = 0, rate_error = 0,
      samples_error = 0, power_error = 0, clock_error = 0, name_error = 0;
  int instant_error = 3;  ///< for the instantaneous power
};

/// Type of the exported function fake_nvml_state, which returns the library's state.
using FakeNvmlState = FakeNvml* (*)();
