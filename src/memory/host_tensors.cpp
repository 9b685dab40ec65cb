#include "memory/host_tensors.h"

#include <reprise/memory/meter.h>

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstring>
#include <optional>
#include <utility>

namespace reprise::detail {
namespace {

struct OnCpu {
  int64_t limit = 0;
  int64_t chunk = 0;
};

std::optional<OnCpu>& on_cpu() {
  static std::optional<OnCpu> setting;
  return setting;
}

/// Ordinary memory for tests on the CPU.
class PlainTensors final : public HostTensors {
 public:
  explicit PlainTensors(const OnCpu& setting) : setting_(setting) {}

  at::Tensor allocate(int64_t bytes) override {
    if (*held_ + bytes > setting_.limit) return {};
    at::Tensor memory;
    try {
      memory = at::zeros({bytes}, at::kByte);
    } catch (const c10::Error& error) {
      if (!is_out_of_memory(error)) throw;
      return {};
    }
    exclude_from_count({memory});
    *held_ += bytes;
    return at::from_blob(
        memory.data_ptr(), {bytes},
        [memory, bytes, held = held_](void*) { *held -= bytes; }, at::kByte);
  }

  std::unique_ptr<Event> start(const std::vector<Copy>& copies, Direction,
                               Event*) override {
    for (const Copy& copy : copies) {
      std::memcpy(copy.to, copy.from, copy.bytes);
    }
    return std::make_unique<Event>();
  }
  void wait(Event&) override {}
  void synchronize() override {}

  int64_t limit_bytes() const override { return setting_.limit; }
  int64_t held_bytes() const override { return *held_; }
  int64_t chunk_bytes() const override { return setting_.chunk; }

 private:
  OnCpu setting_;
  std::shared_ptr<std::atomic<int64_t>> held_ =
      std::make_shared<std::atomic<int64_t>>(0);
};

}  // namespace

HostTensorsOnCpu::HostTensorsOnCpu(int64_t limit_bytes, int64_t chunk_bytes) {
  TORCH_INTERNAL_ASSERT(!on_cpu().has_value());
  on_cpu() = {limit_bytes, chunk_bytes};
}

HostTensorsOnCpu::~HostTensorsOnCpu() {
  on_cpu().reset();
}

bool HostTensorsOnCpu::active() {
  return on_cpu().has_value();
}

std::shared_ptr<HostTensors> HostTensorsOnCpu::make() {
  return on_cpu() ? std::make_shared<PlainTensors>(*on_cpu()) : nullptr;
}

}  // namespace reprise::detail
