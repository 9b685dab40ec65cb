// Compiled against a LibTorch with CUDA; host_store_none.cpp replaces it
// otherwise.
//
// Note [Reuse of device memory]
// The caching allocator gives a freed block to the next request on the stream
// that it was allocated on. This is correct for work on that stream, but not
// while another stream still reads the block. LibTorch's remedy,
// record_stream(), withholds the block until a later request finds that the
// read has finished. The memory that a run needs then depends on timing, and
// inside a capture no read ever finishes. Here the tensor is held until its
// stream waits for the copy. It is then freed like any other tensor, at the
// same point of every run.
// Tested by tests/recompute/host_memory_cuda_test.cpp.
#include "compat/stream_event.h"
#include "memory/host_tensors.h"

#include <reprise/memory/host_store.h>

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <mutex>
#include <optional>
#include <utility>

namespace reprise {
namespace {

using c10::cuda::CUDAStream;
using compat::capture_id;
using compat::StreamEvent;

struct Buffer {
  void* data = nullptr;
  size_t bytes = 0;
  bool in_graph = false;  // a CUDA graph holds its address
};

/// Pool of pinned memory for the copies of one device. LibTorch's own pool is
/// not used, because it rounds sizes up to a power of two.
class PinnedPool {
 public:
  PinnedPool(c10::DeviceIndex device, std::shared_ptr<detail::HostQuota> quota)
      : quota_(std::move(quota)),
        stream_(
            c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device)) {}
  ~PinnedPool() {
    (void)cudaStreamSynchronize(stream_);
    for (auto& [bytes, buffer] : free_) {
      (void)cudaFreeHost(buffer.data);
    }
    quota_->give(held_);
    (void)cudaGetLastError();  // CUDA may be shut down at process exit
  }
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  std::optional<Buffer> take(size_t bytes, bool in_graph) {
    const std::lock_guard lock(mutex_);
    Buffer buffer;
    if (const auto found = free_.find(bytes); found != free_.end()) {
      buffer = found->second;
      free_.erase(found);
    } else {
      if (!take_quota(bytes, in_graph)) return std::nullopt;
      const c10::cuda::CUDAStreamCaptureModeGuard relaxed(
          cudaStreamCaptureModeRelaxed);
      if (cudaHostAlloc(&buffer.data, bytes, cudaHostAllocDefault) !=
          cudaSuccess) {
        (void)cudaGetLastError();
        quota_->give(static_cast<int64_t>(bytes));
        return std::nullopt;
      }
      buffer.bytes = bytes;
      held_ += static_cast<int64_t>(bytes);
    }
    buffer.in_graph = buffer.in_graph || in_graph;
    return buffer;
  }

  void give(const Buffer& buffer) {
    const std::lock_guard lock(mutex_);
    free_.emplace(buffer.bytes, buffer);
  }

  void trim() {
    const std::lock_guard lock(mutex_);
    C10_CUDA_CHECK(cudaStreamSynchronize(stream_));
    for (auto& [bytes, buffer] : free_) {
      C10_CUDA_CHECK(cudaFreeHost(buffer.data));
      release(bytes);
    }
    free_.clear();
  }

  const CUDAStream& stream() const { return stream_; }
  int64_t limit_bytes() const { return quota_->limit_bytes(); }
  int64_t held_bytes() const {
    const std::lock_guard lock(mutex_);
    return held_;
  }

 private:
  void release(size_t bytes) {
    held_ -= static_cast<int64_t>(bytes);
    quota_->give(static_cast<int64_t>(bytes));
  }

  /// Takes `bytes` from the quota. Outside of a capture, frees unused buffers of other sizes
  /// for it, left by an earlier micro-batch size. Returns false if that is not enough.
  bool take_quota(size_t bytes, bool in_graph) {
    const auto wanted = static_cast<int64_t>(bytes);
    if (quota_->take(wanted)) return true;
    if (in_graph) return false;
    C10_CUDA_CHECK(cudaStreamSynchronize(stream_));
    for (auto it = free_.begin(); it != free_.end();) {
      if (it->second.in_graph) {
        ++it;
        continue;
      }
      C10_CUDA_CHECK(cudaFreeHost(it->second.data));
      release(it->first);
      it = free_.erase(it);
      if (quota_->take(wanted)) return true;
    }
    return false;
  }

  const std::shared_ptr<detail::HostQuota> quota_;
  const CUDAStream stream_;
  mutable std::mutex mutex_;
  std::multimap<size_t, Buffer> free_;
  int64_t held_ = 0;
};

class CudaHostCopy final : public HostCopy {
 public:
  CudaHostCopy(std::shared_ptr<PinnedPool> pool, const Buffer& buffer,
               const at::Tensor& bytes)
      : pool_(std::move(pool)),
        buffer_(buffer),
        device_(bytes),
        owner_(current()) {
    copy(buffer_.data, device_.data_ptr(), cudaMemcpyDeviceToHost);
  }

  ~CudaHostCopy() override {
    try {
      const c10::cuda::CUDAGuard guard(owner_.device_index());
      if (device_.defined() && copied_) copied_->block(owner_);
    } catch (...) {
      (void)cudaGetLastError();
    }
    device_.reset();
    pool_->give(buffer_);
  }

  void leave() override {
    if (!device_.defined()) return;
    const c10::cuda::CUDAGuard guard(owner_.device_index());
    copied_->block(owner_);
    copied_.reset();
    device_.reset();
  }

  const at::Tensor& fetch() override {
    if (device_.defined()) return device_;
    const c10::cuda::CUDAGuard guard(owner_.device_index());
    owner_ = current();
    device_ = at::empty(
        {static_cast<int64_t>(buffer_.bytes)},
        at::TensorOptions(at::kByte).device(at::kCUDA, owner_.device_index()));
    copy(device_.data_ptr(), buffer_.data, cudaMemcpyHostToDevice);
    return device_;
  }

  const at::Tensor& bytes() override {
    fetch();
    if (!copied_) return device_;
    const c10::cuda::CUDAGuard guard(owner_.device_index());
    copied_->block(current());
    if (current() == owner_) copied_.reset();
    return device_;
  }

 private:
  CUDAStream current() const {
    return c10::cuda::getCurrentCUDAStream(pool_->stream().device_index());
  }

  /// Starts a copy that waits for the work submitted to the owner's stream so
  /// far.
  void copy(void* to, const void* from, cudaMemcpyKind kind) {
    const CUDAStream& stream = pool_->stream();
    at::cuda::CUDAEvent before;
    before.record(owner_);
    before.block(stream);
    C10_CUDA_CHECK(cudaMemcpyAsync(to, from, buffer_.bytes, kind, stream));
    copied_.emplace(stream);
  }

  std::shared_ptr<PinnedPool> pool_;
  Buffer buffer_;
  at::Tensor device_;  // undefined if the bytes are on the host only
  CUDAStream owner_;   // stream of device_'s memory
  // End of the copy; none once the owner waits for it.
  std::optional<StreamEvent> copied_;
};

class CudaHostStore final : public HostStore {
 public:
  CudaHostStore(c10::DeviceIndex device,
                std::shared_ptr<detail::HostQuota> quota)
      : device_(device),
        pool_(std::make_shared<PinnedPool>(device, std::move(quota))) {}

  std::unique_ptr<HostCopy> send(const at::Tensor& bytes) override {
    const c10::cuda::CUDAGuard guard(device_);
    const bool in_graph =
        capture_id(c10::cuda::getCurrentCUDAStream(device_)) != 0;
    const auto buffer =
        pool_->take(static_cast<size_t>(bytes.numel()), in_graph);
    if (!buffer) return nullptr;
    try {
      return std::make_unique<CudaHostCopy>(pool_, *buffer, bytes);
    } catch (...) {
      pool_->give(*buffer);
      throw;
    }
  }

  void trim() override {
    const c10::cuda::CUDAGuard guard(device_);
    pool_->trim();
  }

  c10::Device device() const override { return {c10::kCUDA, device_}; }
  int64_t limit_bytes() const override { return pool_->limit_bytes(); }
  int64_t held_bytes() const override { return pool_->held_bytes(); }

 private:
  c10::DeviceIndex device_;
  std::shared_ptr<PinnedPool> pool_;
};

}  // namespace

std::shared_ptr<HostStore> detail::make_host_store(
    int device, std::shared_ptr<HostQuota> quota) {
  return std::make_shared<CudaHostStore>(static_cast<c10::DeviceIndex>(device),
                                         std::move(quota));
}

std::shared_ptr<HostStore> make_host_store(int device, int64_t limit_bytes) {
  return detail::make_host_store(
      device, std::make_shared<detail::HostQuota>(limit_bytes));
}

}  // namespace reprise
