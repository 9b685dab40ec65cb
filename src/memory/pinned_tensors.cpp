// Compiled against a LibTorch with CUDA; host_store_none.cpp replaces it
// otherwise.
// Tested by tests/train/optim/host_state_test.cpp on a CUDA device.
#include "compat/stream_event.h"
#include "memory/host_tensors.h"

#include <reprise/memory/meter.h>

#include <ATen/Parallel.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <sys/mman.h>
#include <utility>

namespace reprise::detail {
namespace {

using c10::cuda::CUDAStream;

/// The streams of the copies. Blocks hold a reference, because freeing one waits for them.
struct CopyStreams {
  CopyStreams(c10::DeviceIndex index, std::shared_ptr<HostQuota> shared)
      : quota(std::move(shared)),
        to_device(
            c10::cuda::getStreamFromPool(/*isHighPriority=*/false, index)),
        to_host(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, index)) {
  }

  /// Does not throw: CUDA may be shut down at process exit.
  void synchronize_quietly() const {
    (void)cudaStreamSynchronize(to_device);
    (void)cudaStreamSynchronize(to_host);
    (void)cudaGetLastError();
  }

  std::shared_ptr<HostQuota> quota;
  CUDAStream to_device, to_host;
  std::atomic<int64_t> held{0};
};

struct PinnedEvent final : HostTensors::Event {
  explicit PinnedEvent(const CUDAStream& stream) : event(stream) {}
  compat::StreamEvent event;
};

/// Pinned memory. cudaHostAlloc() fills it with zeros in one thread and in small pages, which
/// takes seconds for the state of a large model. Ordinary memory that all threads have filled,
/// in large pages, is registered much faster.
struct PinnedMemory {
  void* data = nullptr;
  size_t bytes = 0;
  bool registered = false;

  /// Returns memory filled with zeros; without data if the system does not allow it.
  static PinnedMemory allocate(size_t bytes) {
    PinnedMemory memory{nullptr, bytes, true};
    if (static_cast<int64_t>(bytes) > available_memory()) return memory;
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data != MAP_FAILED) {
      (void)madvise(data, bytes, MADV_HUGEPAGE);
      fill_with_zeros(data, bytes);
      if (cudaHostRegister(data, bytes, cudaHostRegisterDefault) ==
          cudaSuccess) {
        memory.data = data;
        return memory;
      }
      (void)cudaGetLastError();
      (void)munmap(data, bytes);
    }
    memory.registered = false;
    if (cudaHostAlloc(&memory.data, bytes, cudaHostAllocDefault) !=
        cudaSuccess) {
      (void)cudaGetLastError();
      memory.data = nullptr;
      return memory;
    }
    fill_with_zeros(memory.data, bytes);
    return memory;
  }

  void free() const {
    if (registered) {
      (void)cudaHostUnregister(data);
      (void)munmap(data, bytes);
    } else {
      (void)cudaFreeHost(data);
    }
    (void)cudaGetLastError();
  }

 private:
  static void fill_with_zeros(void* data, size_t bytes) {
    constexpr size_t kPart = size_t{32} << 20;
    const auto parts = static_cast<int64_t>((bytes + kPart - 1) / kPart);
    at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
      const size_t from = static_cast<size_t>(begin) * kPart;
      const size_t to = std::min(static_cast<size_t>(end) * kPart, bytes);
      std::memset(static_cast<char*>(data) + from, 0, to - from);
    });
  }
};

class PinnedTensors final : public HostTensors {
 public:
  PinnedTensors(c10::DeviceIndex device, std::shared_ptr<HostQuota> quota)
      : device_(device),
        streams_(std::make_shared<CopyStreams>(device, std::move(quota))) {}

  at::Tensor allocate(int64_t bytes) override {
    if (bytes == 0) return at::empty({0}, at::kByte);
    if (!streams_->quota->take(bytes)) return {};
    const c10::cuda::CUDAGuard guard(device_);
    const auto memory = PinnedMemory::allocate(static_cast<size_t>(bytes));
    if (memory.data == nullptr) {
      streams_->quota->give(bytes);
      return {};
    }
    streams_->held += bytes;
    return at::from_blob(
        memory.data, {bytes},
        [bytes, memory, streams = streams_](void*) {
          streams->synchronize_quietly();
          memory.free();
          streams->held -= bytes;
          streams->quota->give(bytes);
        },
        at::kByte);
  }

  std::unique_ptr<Event> start(const std::vector<Copy>& copies,
                               Direction direction, Event* after) override {
    const c10::cuda::CUDAGuard guard(device_);
    const bool in = direction == Direction::kToDevice;
    const CUDAStream& stream = in ? streams_->to_device : streams_->to_host;
    at::cuda::CUDAEvent before;
    before.record(c10::cuda::getCurrentCUDAStream(device_));
    before.block(stream);
    if (after != nullptr) static_cast<PinnedEvent*>(after)->event.block(stream);
    for (const Copy& copy : copies) {
      C10_CUDA_CHECK(cudaMemcpyAsync(
          copy.to, copy.from, copy.bytes,
          in ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost, stream));
    }
    return std::make_unique<PinnedEvent>(stream);
  }

  void wait(Event& event) override {
    const c10::cuda::CUDAGuard guard(device_);
    static_cast<PinnedEvent&>(event).event.block(
        c10::cuda::getCurrentCUDAStream(device_));
  }

  void synchronize() override {
    const c10::cuda::CUDAGuard guard(device_);
    C10_CUDA_CHECK(cudaStreamSynchronize(streams_->to_device));
    C10_CUDA_CHECK(cudaStreamSynchronize(streams_->to_host));
  }

  int64_t limit_bytes() const override {
    return streams_->quota->limit_bytes();
  }
  int64_t held_bytes() const override { return streams_->held; }

 private:
  c10::DeviceIndex device_;
  std::shared_ptr<CopyStreams> streams_;
};

}  // namespace

std::shared_ptr<HostTensors> make_pinned_tensors(
    int device, std::shared_ptr<HostQuota> quota) {
  return std::make_shared<PinnedTensors>(static_cast<c10::DeviceIndex>(device),
                                         std::move(quota));
}

}  // namespace reprise::detail
