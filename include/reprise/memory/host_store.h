#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

/// A device's memory moved to the host and back, beside the device's own work.
namespace reprise {

/// Bytes on their way to the host, there, or on their way back. May be destroyed at
/// any of these moments; that waits for nothing on the host. Not thread-safe.
class HostCopy {
 public:
  virtual ~HostCopy() = default;

  /// Lets go of the bytes on the device. What the current stream does from here on
  /// waits for the copy, so that whoever gets their memory next cannot overwrite
  /// what is still being read.
  virtual void leave() = 0;

  /// Begins to bring them back, into memory that is taken now. The result is there
  /// to be counted; to be read, ask for bytes(). Where they never left, or come back
  /// already, does nothing.
  virtual const at::Tensor& fetch() = 0;

  /// The bytes on the device, for the current stream, which waits for them.
  virtual const at::Tensor& bytes() = 0;
};

/// Where they go. Its memory is used again from one copy to the next and goes back
/// to the system with the store and its last copy. Thread-safe.
class HostStore {
 public:
  virtual ~HostStore() = default;

  /// Begins to copy `bytes`: uint8, of one dimension, contiguous, on `device()`. They
  /// must not change before leave(). Null: there is no room, nothing was done.
  virtual std::unique_ptr<HostCopy> send(const at::Tensor& bytes) = 0;

  /// Gives what no copy uses back to the system. No graph that was captured with
  /// this store may run afterwards.
  virtual void trim() = 0;

  virtual c10::Device device() const = 0;  ///< whose memory is moved
  virtual int64_t limit_bytes() const = 0;
  virtual int64_t held_bytes() const = 0;  ///< of the host, in use or not
};

/// In pinned memory, up to `limit_bytes`. Copies run on one stream of their own, in
/// the order they were asked for: a buffer that is used again is then read before it
/// is written, with nothing to wait for on the host; and the two directions, one the
/// forward's and one the backward's, hardly ever meet.
///
/// Works inside a CudaGraph's capture, where the copies become branches of the graph:
/// leave() and bytes() join them. Buffers used there stay in place until trim() or
/// until the store goes, which must be after the graph.
///
/// Throws c10::Error in a build without CUDA.
std::shared_ptr<HostStore> make_host_store(int device, int64_t limit_bytes);

}  // namespace reprise
