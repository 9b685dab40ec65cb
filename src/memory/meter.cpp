#include "compat/cpu_allocator.h"
#include "compat/cuda.h"

#include <reprise/memory/meter.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <vector>

namespace reprise {
namespace {

// The hot path: two relaxed atomic operations per allocation.
std::atomic<int64_t> g_cpu_live{0};
std::atomic<int64_t> g_cpu_peak{0};

void raise_cpu_peak(int64_t live) {
  int64_t peak = g_cpu_peak.load(std::memory_order_relaxed);
  while (live > peak && !g_cpu_peak.compare_exchange_weak(
                            peak, live, std::memory_order_relaxed)) {
  }
}

void on_cpu_allocation(int64_t bytes) {
  const int64_t live =
      g_cpu_live.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  if (bytes > 0) raise_cpu_peak(live);
}

struct Usage {
  int64_t live = 0;
  int64_t peak = 0;
  int64_t reserved_peak = 0;
};

Usage usage_and_reset_peak(c10::Device device) {
  if (device.is_cuda()) {
    const auto memory = compat::cuda_memory(device.index());
    compat::reset_cuda_memory_peak(device.index());
    return {memory.allocated, memory.allocated_peak, memory.reserved_peak};
  }
  const int64_t live = g_cpu_live.load(std::memory_order_relaxed);
  const int64_t peak = g_cpu_peak.exchange(live, std::memory_order_relaxed);
  // Another thread may have allocated between the two lines above.
  raise_cpu_peak(g_cpu_live.load(std::memory_order_relaxed));
  return {live, std::max(peak, live), std::max(peak, live)};
}

}  // namespace

void count_cpu_memory() {
  static const bool installed = [] {
    compat::install_cpu_allocator(&on_cpu_allocation);
    return true;
  }();
  (void)installed;
}

int64_t live_bytes(c10::Device device) {
  if (device.is_cuda()) {
    return compat::cuda_memory(device.index()).allocated;
  }
  count_cpu_memory();
  return g_cpu_live.load(std::memory_order_relaxed);
}

void include_in_count(const std::vector<at::Tensor>& tensors) {
  count_cpu_memory();
  for (const auto& tensor : tensors) {
    if (!tensor.defined() || !tensor.device().is_cpu()) continue;
    compat::start_reporting(tensor.storage());
  }
}

void exclude_from_count(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    if (!tensor.defined() || !tensor.device().is_cpu()) continue;
    compat::stop_reporting(tensor.storage().data_ptr());
  }
}

int64_t allocated_bytes(int64_t bytes, c10::Device device) {
  constexpr int64_t kCudaBlock = 512;
  if (!device.is_cuda()) return bytes;
  return (bytes + kCudaBlock - 1) / kCudaBlock * kCudaBlock;
}

struct MemoryMeter::Record {
  int64_t start = 0;
  int64_t peak = 0;
  int64_t reserved_peak = 0;
};

/// The live meters of one device. The allocator has a single peak. Whenever a
/// meter starts or is read, that peak is merged into every live meter and
/// reset, so that each meter's maximum covers exactly its own lifetime.
class DeviceMeters {
 public:
  static DeviceMeters& of(c10::Device device) {
    static std::mutex mutex;
    static auto* all = new std::map<int, DeviceMeters>;
    const std::lock_guard<std::mutex> lock(mutex);
    DeviceMeters& meters = (*all)[device.is_cuda() ? device.index() : -1];
    meters.device_ = device;
    return meters;
  }

  void start(const std::shared_ptr<MemoryMeter::Record>& record) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Usage usage = merge_peak();
    *record = {usage.live, usage.live, usage.live};
    if (std::find(live_.begin(), live_.end(), record) == live_.end()) {
      live_.push_back(record);
    }
  }

  MemoryMeter::Record read(const std::shared_ptr<MemoryMeter::Record>& record) {
    const std::lock_guard<std::mutex> lock(mutex_);
    merge_peak();
    return *record;
  }

  void stop(const std::shared_ptr<MemoryMeter::Record>& record) {
    const std::lock_guard<std::mutex> lock(mutex_);
    merge_peak();
    live_.erase(std::find(live_.begin(), live_.end(), record));
  }

 private:
  Usage merge_peak() {
    const Usage usage = usage_and_reset_peak(device_);
    for (const auto& record : live_) {
      record->peak = std::max(record->peak, usage.peak);
      record->reserved_peak =
          std::max(record->reserved_peak, usage.reserved_peak);
    }
    return usage;
  }

  c10::Device device_{c10::kCPU};
  std::mutex mutex_;
  std::vector<std::shared_ptr<MemoryMeter::Record>> live_;
};

MemoryMeter::MemoryMeter(c10::Device device)
    : device_(device), record_(std::make_shared<Record>()) {
  TORCH_CHECK(device.is_cpu() || device.is_cuda(),
              "[MemoryMeter] expected a CPU or CUDA device, got ", device);
  if (device_.is_cpu()) count_cpu_memory();
  if (device_.is_cuda() && !device_.has_index()) device_.set_index(0);
  DeviceMeters::of(device_).start(record_);
}

MemoryMeter::~MemoryMeter() {
  DeviceMeters::of(device_).stop(record_);
}

int64_t MemoryMeter::start_bytes() const {
  return record_->start;
}

int64_t MemoryMeter::live_bytes() const {
  return reprise::live_bytes(device_);
}

int64_t MemoryMeter::peak_bytes() const {
  return DeviceMeters::of(device_).read(record_).peak;
}

int64_t MemoryMeter::reserved_peak_bytes() const {
  return DeviceMeters::of(device_).read(record_).reserved_peak;
}

void MemoryMeter::restart() {
  DeviceMeters::of(device_).start(record_);
}

}  // namespace reprise
