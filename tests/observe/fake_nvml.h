#pragma once

/// What the stand-in for NVML (fake_nvml.cpp) is told by tests. Two devices of
/// 80 GB; the second is a bit smaller and at another place of the bus.
struct FakeNvml {
  unsigned long long used[2] = {1000000000, 2000000000};
  unsigned rate = 40;  ///< percent
  unsigned milliwatts = 350500;
  unsigned mhz = 1755;
  /// Samples of utilisation in the driver's buffer, a millisecond apart from
  /// time 1001 on.
  unsigned samples[64] = {};
  unsigned sample_count = 0;
  unsigned long long first_sample_us = 1001;
  /// More of them: stamps and the moments from which on the driver has them, in
  /// microseconds since the epoch.
  struct Timed {
    unsigned long long stamp_us = 0, told_us = 0;
    unsigned percent = 0;
  } timed[64] = {};
  unsigned timed_count = 0;
  /// The rate from a moment on.
  unsigned later_rate = 0;
  unsigned long long later_us = ~0ULL;
  unsigned instant_milliwatts = 123000;
  bool repeats = false;   ///< the whole buffer, whatever was seen
  int asked_device = -1;  ///< whose memory was asked for last
  int starts = 0, stops = 0;
  int rate_calls = 0, sample_calls = 0, power_calls = 0;
  int spin_us = 0;  ///< that asking for power takes of the CPU
  int samples_spin_us = 0;

  /// What functions answer instead; 0: they work.
  int init_error = 0, memory_error = 0, memory2_error = 0, rate_error = 0,
      samples_error = 0, power_error = 0, clock_error = 0, name_error = 0;
  int instant_error = 3;  ///< of the power of the moment
};

/// Exported as "fake_nvml_state"; the library's own, for as long as it is loaded.
using FakeNvmlState = FakeNvml* (*)();
