#include "memory/host_tensors.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

namespace reprise::detail {
namespace {

struct OnCpu {
  int64_t limit = 0;
  int64_t chunk = 0;
  std::optional<int> left{};  // allocations that succeed; nullopt: all
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
    if (on_cpu() && on_cpu()->left && (*on_cpu()->left)-- <= 0) return {};
    // Not of LibTorch's allocator, whose memory is counted.
    constexpr size_t kAlign = 64;
    const size_t whole =
        (static_cast<size_t>(bytes) + kAlign - 1) / kAlign * kAlign;
    void* memory = std::aligned_alloc(kAlign, std::max(whole, kAlign));
    if (memory == nullptr) return {};
    std::memset(memory, 0, whole);
    *held_ += bytes;
    return at::from_blob(
        memory, {bytes},
        [bytes, held = held_](void* data) {
          std::free(data);
          *held -= bytes;
        },
        at::kByte);
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

void HostTensorsOnCpu::fail_after(int count) {
  on_cpu()->left = count;
}

bool HostTensorsOnCpu::active() {
  return on_cpu().has_value();
}

std::shared_ptr<HostTensors> HostTensorsOnCpu::make(int64_t limit_bytes) {
  if (!on_cpu()) return nullptr;
  OnCpu setting = *on_cpu();
  setting.limit = std::min(setting.limit, limit_bytes);
  return std::make_shared<PlainTensors>(setting);
}

}  // namespace reprise::detail
