// Compiled against a LibTorch with CUDA; host_store_none.cpp replaces it
// otherwise.
// Tested by tests/train/optim/host_state_test.cpp on a CUDA device.
#include "compat/stream_event.h"
#include "memory/host_tensors.h"

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <cstring>
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

class PinnedTensors final : public HostTensors {
 public:
  PinnedTensors(c10::DeviceIndex device, std::shared_ptr<HostQuota> quota)
      : device_(device),
        streams_(std::make_shared<CopyStreams>(device, std::move(quota))) {}

  at::Tensor allocate(int64_t bytes) override {
    if (!streams_->quota->take(bytes)) return {};
    const c10::cuda::CUDAGuard guard(device_);
    void* data = nullptr;
    if (cudaHostAlloc(&data, static_cast<size_t>(bytes),
                      cudaHostAllocDefault) != cudaSuccess) {
      (void)cudaGetLastError();
      streams_->quota->give(bytes);
      return {};
    }
    std::memset(data, 0, static_cast<size_t>(bytes));
    streams_->held += bytes;
    return at::from_blob(
        data, {bytes},
        [bytes, streams = streams_](void* memory) {
          streams->synchronize_quietly();
          (void)cudaFreeHost(memory);
          (void)cudaGetLastError();
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
