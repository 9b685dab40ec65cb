#include "compat/cpu_allocator.h"

#include "compat/block_cache.h"
#include "compat/reserved_scope.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <atomic>
#include <cstddef>
#include <limits>
#include <memory>
#include <new>
#include <utility>

namespace reprise::compat {
namespace {

// LibTorch's raw_allocate() requires the data pointer to be its own context, so
// the sizes are stored in front of the data. The header fills a cache line to
// keep the alignment.
constexpr size_t kHeaderBytes = 64;

struct Header {
  int64_t reported = 0;  // 0 after stop_reporting()
  size_t block_bytes = 0;
};
static_assert(sizeof(Header) <= kHeaderBytes);

Header& header_of(void* data) {
  return *reinterpret_cast<Header*>(static_cast<char*>(data) - kHeaderBytes);
}

/// Never destroyed: tensors may outlive every static object.
BlockCache& block_cache() {
  static auto* cache = new BlockCache;
  return *cache;
}

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
  // Begins like LibTorch's own message.
  TORCH_CHECK(g_injection.counted++ != g_injection.after,
              "DefaultCPUAllocator: can't allocate memory: you tried to "
              "allocate ",
              bytes, " bytes. (injected)");
}

void give(void* data) {
  if (data == nullptr) return;
  const Header header = header_of(data);
  char* block = static_cast<char*>(data) - kHeaderBytes;
  g_listener.load(std::memory_order_relaxed)(-header.reported);
  if (header.block_bytes >= BlockCache::kMinBytes) {
    block_cache().give(block, header.block_bytes);
  } else {
    c10::free_cpu(block);
  }
}

void* take(size_t bytes) {
  if (bytes == 0) return nullptr;
  TORCH_CHECK(bytes < std::numeric_limits<int64_t>::max() - kHeaderBytes,
              "[cpu allocator] expected a size below 2^63, got ", bytes);
  fail_if_injected(bytes);
  const size_t whole = bytes + kHeaderBytes;
  void* block = whole >= BlockCache::kMinBytes ? block_cache().take(whole)
                                               : c10::alloc_cpu(whole);
  void* data = static_cast<char*>(block) + kHeaderBytes;
  new (block) Header{static_cast<int64_t>(bytes), whole};
  g_listener.load(std::memory_order_relaxed)(static_cast<int64_t>(bytes));
  return data;
}

/// Memory of another allocator that is reported.
struct Adopted {
  c10::DataPtr data;
  int64_t bytes = 0;
};

void give_adopted(void* context) {
  const std::unique_ptr<Adopted> adopted(static_cast<Adopted*>(context));
  g_listener.load(std::memory_order_relaxed)(-adopted->bytes);
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
              "[install_cpu_allocator] a listener is already installed");
  // Never freed: tensors may outlive every static object.
  static auto* allocator = new ReportingAllocator;
  c10::SetCPUAllocator(allocator, /*priority=*/100);
}

int64_t start_reporting(c10::Storage storage) {
  const AllocationListener listener =
      g_listener.load(std::memory_order_relaxed);
  const c10::DataPtr& now = storage.data_ptr();
  const auto deleter = now.get_deleter();
  if (listener == nullptr || now.get() == nullptr || deleter == &give ||
      deleter == &give_adopted) {
    return 0;
  }
  auto* adopted = new Adopted;  // owned by the storage
  adopted->bytes = static_cast<int64_t>(storage.nbytes());
  adopted->data =
      storage.set_data_ptr({now.get(), adopted, &give_adopted, now.device()});
  listener(adopted->bytes);
  return adopted->bytes;
}

int64_t stop_reporting(const c10::DataPtr& data) {
  if (data.get() == nullptr) return 0;
  int64_t* reported = nullptr;
  if (data.get_deleter() == &give) {
    reported = &header_of(data.get()).reported;
  } else if (data.get_deleter() == &give_adopted) {
    reported = &static_cast<Adopted*>(data.get_context())->bytes;
  } else {
    return 0;
  }
  const int64_t bytes = std::exchange(*reported, 0);
  if (bytes > 0) g_listener.load(std::memory_order_relaxed)(-bytes);
  return bytes;
}

void release_cpu_blocks() {
  block_cache().release();
}

void inject_failure(int64_t after, int64_t min_bytes) {
  TORCH_CHECK(after >= 0 && min_bytes >= 0,
              "[inject_failure] expected non-negative numbers, got ", after,
              " and ", min_bytes);
  TORCH_CHECK(!g_injection.on,
              "[inject_failure] a failure is already being injected");
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
