#pragma once

#include "memory/host_tensors.h"
#include "train/step/graph_runs.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace reprise::testing {

/// Lets trainings keep tensors in host memory: on the CPU, HostTensorsOnCpu stands for it.
/// Chunks are small, so that parameters are divided.
struct Host {
  explicit Host(int64_t limit = int64_t{1} << 30, int64_t chunk = 2048) {
    if (device().is_cpu()) on_cpu.emplace(limit, chunk);
  }
  std::optional<detail::HostTensorsOnCpu> on_cpu;
};

inline Ended run_in(TrainConfig config, StatePlace place,
                    const std::vector<int>& stops = {},
                    TrainListener* listener = nullptr,
                    const Failing& failing = {}) {
  config.state = place;
  return run(config, stops, listener, failing);
}

}  // namespace reprise::testing
