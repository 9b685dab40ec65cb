#include <reprise/torch/cpu_allocator.h>
#include <reprise/torch/out_of_memory.h>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <atomic>
#include <cstddef>
#include <limits>
#include <utility>

namespace reprise::compat {
namespace {

// LibTorch's raw_allocate() wants the data pointer to be its own context, so
// the size sits in front of the data; a whole line, to keep the alignment.
constexpr size_t kHeaderBytes = 64;

std::atomic<AllocationListener> g_listener{nullptr};

struct Injection {
  std::atomic<bool> on{false};
  std::atomic<int64_t> counted{0};
  std::atomic<int64_t> after{0};
  std::atomic<int64_t> min_bytes{0};
};
Injection g_injection;

void fail_if_injected(size_t bytes) {
  if (!g_injection.on.load(std::memory_order_relaxed)) return;
  if (static_cast<int64_t>(bytes) < g_injection.min_bytes) return;
  if (ReservedScope::active()) return;
  // Begins as LibTorch's own text does.
  TORCH_CHECK(g_injection.counted++ != g_injection.after,
              "DefaultCPUAllocator: can't allocate memory: you tried to "
              "allocate ",
              bytes, " bytes. (injected)");
}

void give(void* data) {
  if (data == nullptr) return;
  char* block = static_cast<char*>(data) - kHeaderBytes;
  g_listener.load(std::memory_order_relaxed)(
      -*reinterpret_cast<const int64_t*>(block));
  c10::free_cpu(block);
}

void* take(size_t bytes) {
  if (bytes == 0) return nullptr;
  TORCH_CHECK(bytes < std::numeric_limits<int64_t>::max() - kHeaderBytes,
              "[cpu allocator] expected a size below 2^63, got ", bytes);
  fail_if_injected(bytes);
  char* block = static_cast<char*>(c10::alloc_cpu(bytes + kHeaderBytes));
  *reinterpret_cast<int64_t*>(block) = static_cast<int64_t>(bytes);
  g_listener.load(std::memory_order_relaxed)(static_cast<int64_t>(bytes));
  return block + kHeaderBytes;
}

class ReportingAllocator final : public c10::Allocator {
 public:
#if TORCH_VERSION_MAJOR >= 2 && \
    (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 3)
  c10::DataPtr allocate(size_t bytes) override {
    return data_of(bytes);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
#else
  c10::DataPtr allocate(size_t bytes) const override {
    return data_of(bytes);
  }
#endif
  c10::DeleterFnPtr raw_deleter() const override {
    return &give;
  }

 private:
  static c10::DataPtr data_of(size_t bytes) {
    void* data = take(bytes);
    return {data, data, &give, c10::Device(c10::DeviceType::CPU)};
  }
};

}  // namespace

void install_cpu_allocator(AllocationListener listener) {
  TORCH_CHECK(listener != nullptr,
              "[install_cpu_allocator] expected a listener, got none");
  AllocationListener none = nullptr;
  TORCH_CHECK(g_listener.compare_exchange_strong(none, listener),
              "[install_cpu_allocator] a listener is installed already");
  // Never freed: tensors may outlive every static object.
  static auto* allocator = new ReportingAllocator;
  c10::SetCPUAllocator(allocator, /*priority=*/100);
}

int64_t stop_reporting(const c10::DataPtr& data) {
  if (data.get() == nullptr || data.get_deleter() != &give) return 0;
  auto* header =
      reinterpret_cast<int64_t*>(static_cast<char*>(data.get()) - kHeaderBytes);
  const int64_t bytes = std::exchange(*header, 0);
  if (bytes > 0) g_listener.load(std::memory_order_relaxed)(-bytes);
  return bytes;
}

void inject_failure(int64_t after, int64_t min_bytes) {
  TORCH_CHECK(after >= 0 && min_bytes >= 0,
              "[inject_failure] expected numbers of 0 or more, got ", after,
              " and ", min_bytes);
  TORCH_CHECK(!g_injection.on, "[inject_failure] one is on already");
  g_injection.counted = 0;
  g_injection.after = after;
  g_injection.min_bytes = min_bytes;
  g_injection.on = true;
}

void end_injection() {
  g_injection.on = false;
}

InjectedFailure injected_failure() {
  const int64_t counted = g_injection.counted;
  return {counted, counted > g_injection.after};
}

}  // namespace reprise::compat
