#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

/// Copies of device memory in host memory, made asynchronously to the device's
/// own work.
namespace reprise {

/// A block of device memory that is being copied to the host, is there, or is
/// being copied back. May be destroyed in any of these states; the destructor
/// does not block the host. Not thread-safe.
class HostCopy {
 public:
  virtual ~HostCopy() = default;

  /// Frees the device memory. Later work on the current stream waits for the
  /// copy, so that the memory cannot be overwritten while it is still being
  /// read.
  virtual void leave() = 0;

  /// Allocates device memory and starts the copy back to the device. Does
  /// nothing if the bytes are on the device or on their way back already. The
  /// result may be used to count memory; call bytes() to read it.
  virtual const at::Tensor& fetch() = 0;

  /// Returns the bytes on the device, fetched if necessary. The current stream
  /// waits for the copy.
  virtual const at::Tensor& bytes() = 0;
};

/// Host memory for copies. Buffers are reused from one copy to the next and
/// returned to the system when the store and its last copy are destroyed.
/// Thread-safe.
class HostStore {
 public:
  virtual ~HostStore() = default;

  /// Starts a copy of `bytes` to the host. `bytes` must be a contiguous,
  /// one-dimensional uint8 tensor on `device()` and must not change before
  /// leave(). Returns null, and does nothing, if the store has no room.
  virtual std::unique_ptr<HostCopy> send(const at::Tensor& bytes) = 0;

  /// Returns unused buffers to the system. CUDA graphs captured with this store
  /// must not be replayed afterwards.
  virtual void trim() = 0;

  virtual c10::Device device() const = 0;   ///< device whose memory is copied
  virtual int64_t limit_bytes() const = 0;  ///< maximum of held_bytes()
  virtual int64_t held_bytes()
      const = 0;  ///< host memory allocated, used or not
};

/// Creates a store of up to `limit_bytes` of pinned memory for a CUDA device.
///
/// All copies run on one stream of their own, in the order of the calls. A
/// buffer can therefore be reused without synchronizing with the host. The two
/// directions rarely compete, since one is used by the forward pass and the
/// other by the backward pass.
///
/// Copies may be captured into a CUDA graph, in which they become branches that
/// leave() and bytes() join. Buffers used by a CUDA graph keep their addresses
/// until trim() is called or the store is destroyed, so the store must outlive
/// the graph.
///
/// Throws c10::Error in a build without CUDA.
std::shared_ptr<HostStore> make_host_store(int device, int64_t limit_bytes);

}  // namespace reprise
