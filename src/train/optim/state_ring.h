#pragma once

#include "memory/host_tensors.h"

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace reprise::detail {

/// Device buffers through which chunks of host memory pass: a chunk is copied in, changed on
/// the device and copied back, while the next one is on its way in and the last one on its way
/// out. Tested by tests/train/optim/host_state_test.cpp.
class StateRing {
 public:
  /// Allocates buffers for `chunks` chunks of up to `bytes` bytes each, with the allocator of
  /// `device`. `host` must outlive the ring.
  StateRing(HostTensors& host, torch::Device device, int64_t bytes,
            size_t chunks);
  /// Makes the current stream wait for all copies, so that the buffers can be reused.
  ~StateRing();
  StateRing(const StateRing&) = delete;
  StateRing& operator=(const StateRing&) = delete;

  /// Buffer of a chunk. Others use it too, before and afterwards.
  const torch::Tensor& buffer(size_t chunk) const {
    return slots_[chunk % slots_.size()].buffer;
  }

  /// Part of a chunk.
  struct Part {
    void* host = nullptr;
    void* device = nullptr;  ///< in the chunk's buffer
    size_t bytes = 0;
  };

  /// Passes all chunks, in order, through the device and calls `change` for each while it is
  /// there.
  void pass(const std::vector<std::vector<Part>>& chunks,
            const std::function<void(size_t chunk)>& change);

 private:
  struct Slot {
    torch::Tensor buffer;
    std::unique_ptr<HostTensors::Event> in, out;  // the last copies
  };
  void fetch(size_t chunk, const std::vector<Part>& parts);
  void send(size_t chunk, const std::vector<Part>& parts);

  static constexpr size_t kSlots = 3;

  HostTensors& host_;
  std::vector<Slot> slots_;
};

}  // namespace reprise::detail
