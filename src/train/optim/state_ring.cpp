// Tested by tests/train/optim/host_state_test.cpp.
#include "train/optim/state_ring.h"

#include <algorithm>

namespace reprise::detail {
namespace {

using Direction = HostTensors::Direction;

/// Returns the copies of a chunk; adjacent parts become one.
std::vector<HostTensors::Copy> copies_of(
    const std::vector<StateRing::Part>& parts, Direction direction) {
  std::vector<StateRing::Part> merged;
  const auto end = [](void* begin, size_t bytes) -> void* {
    return static_cast<char*>(begin) + bytes;
  };
  for (const StateRing::Part& part : parts) {
    if (!merged.empty() &&
        end(merged.back().host, merged.back().bytes) == part.host &&
        end(merged.back().device, merged.back().bytes) == part.device) {
      merged.back().bytes += part.bytes;
    } else {
      merged.push_back(part);
    }
  }
  std::vector<HostTensors::Copy> copies;
  for (const StateRing::Part& part : merged) {
    copies.push_back(
        direction == Direction::kToDevice
            ? HostTensors::Copy{part.device, part.host, part.bytes}
            : HostTensors::Copy{part.host, part.device, part.bytes});
  }
  return copies;
}

}  // namespace

StateRing::StateRing(HostTensors& host, torch::Device device, int64_t bytes,
                     size_t chunks)
    : host_(host), slots_(std::min(kSlots, chunks)) {
  for (Slot& slot : slots_) {
    slot.buffer = torch::empty(
        {bytes}, torch::TensorOptions(torch::kByte).device(device));
  }
}

StateRing::~StateRing() {
  for (Slot& slot : slots_) {
    try {
      if (slot.in) host_.wait(*slot.in);
      if (slot.out) host_.wait(*slot.out);
    } catch (const c10::Error&) {
      // The device has failed, which later work reports.
    }
  }
}

void StateRing::fetch(size_t chunk, const std::vector<Part>& parts) {
  Slot& slot = slots_[chunk % slots_.size()];
  // The buffer is free once its last chunk is on the host again.
  slot.in = host_.start(copies_of(parts, Direction::kToDevice),
                        Direction::kToDevice, slot.out.get());
}

void StateRing::send(size_t chunk, const std::vector<Part>& parts) {
  Slot& slot = slots_[chunk % slots_.size()];
  slot.out = host_.start(copies_of(parts, Direction::kToHost),
                         Direction::kToHost, nullptr);
}

void StateRing::pass(const std::vector<std::vector<Part>>& chunks,
                     const std::function<void(size_t chunk)>& change) {
  if (!chunks.empty()) fetch(0, chunks[0]);
  for (size_t i = 0; i < chunks.size(); ++i) {
    // Before the change of this chunk, which the copy would wait for otherwise.
    if (i + 1 < chunks.size() && slots_.size() > 1) {
      fetch(i + 1, chunks[i + 1]);
    }
    host_.wait(*slots_[i % slots_.size()].in);
    change(i);
    send(i, chunks[i]);
  }
}

}  // namespace reprise::detail
