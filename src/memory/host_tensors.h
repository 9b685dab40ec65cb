#pragma once

#include "memory/host_quota.h"

#include <reprise/memory/host_store.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

namespace reprise::detail {

/// Host memory for tensors that are on a device only while they are used, and asynchronous
/// copies between the two. Unlike those of a HostStore, the blocks belong to the caller and
/// keep their contents. Tested by tests/memory/host_tensors_test.cpp and
/// tests/train/optim/host_state_test.cpp.
class HostTensors {
 public:
  virtual ~HostTensors() = default;

  /// Allocates a block of zeros, a one-dimensional uint8 tensor aligned to at least 64 bytes.
  /// Returns an undefined tensor if limit_bytes() or the system does not allow it. The block
  /// may be freed at any time; that waits for all copies.
  virtual at::Tensor allocate(int64_t bytes) = 0;

  struct Copy {
    void* to = nullptr;
    const void* from = nullptr;
    size_t bytes = 0;
  };
  enum class Direction { kToDevice, kToHost };

  /// End of a copy.
  class Event {
   public:
    virtual ~Event() = default;
  };

  /// Starts copies that wait for `after`, unless it is null, and for the work submitted to the
  /// current stream so far. Copies in one direction run in the order of the calls, those in
  /// different directions concurrently. The memory must stay valid until the end of the copies
  /// is known from wait() or synchronize().
  virtual std::unique_ptr<Event> start(const std::vector<Copy>& copies,
                                       Direction direction, Event* after) = 0;

  /// Makes later work on the current stream wait for the copies.
  virtual void wait(Event& event) = 0;

  /// Blocks until all copies have ended.
  virtual void synchronize() = 0;

  /// Maximum of held_bytes(), if no other user of the quota holds any.
  virtual int64_t limit_bytes() const = 0;
  virtual int64_t held_bytes() const = 0;  ///< bytes of all blocks
  /// Bytes that callers should copy at a time.
  virtual int64_t chunk_bytes() const { return int64_t{64} << 20; }
};

/// Creates host memory for a CUDA device, pinned, within `quota`. Throws c10::Error in a build
/// without CUDA.
std::shared_ptr<HostTensors> make_pinned_tensors(
    int device, std::shared_ptr<HostQuota> quota);

/// make_host_store() within `quota`.
std::shared_ptr<HostStore> make_host_store(int device,
                                           std::shared_ptr<HostQuota> quota);

/// For tests: while such an object exists, trainings on the CPU may keep tensors in "host"
/// memory, which is ordinary memory that is excluded from memory counts, and copied
/// synchronously. At most one may exist.
class HostTensorsOnCpu {
 public:
  HostTensorsOnCpu(int64_t limit_bytes, int64_t chunk_bytes);
  ~HostTensorsOnCpu();
  HostTensorsOnCpu(const HostTensorsOnCpu&) = delete;
  HostTensorsOnCpu& operator=(const HostTensorsOnCpu&) = delete;

  /// Makes allocations fail, as with a limit for locked memory, after `count` more of them.
  static void fail_after(int count);
  static bool active();
  /// Creates such memory, of up to `limit_bytes`; null if no object exists.
  static std::shared_ptr<HostTensors> make(
      int64_t limit_bytes = std::numeric_limits<int64_t>::max());
};

}  // namespace reprise::detail
