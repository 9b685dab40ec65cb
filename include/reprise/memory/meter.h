#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>
#include <vector>

/// Memory of tensors, counted by the allocator.
///
/// On the CPU, a counting allocator replaces LibTorch's when the first meter is
/// created or `count_cpu_memory()` is called. It counts every tensor allocated
/// from then on, exactly. On CUDA, the numbers are those of LibTorch's caching
/// allocator, which rounds blocks up to 512 bytes. Neither includes memory that
/// libraries allocate themselves (BLAS and oneDNN scratch space, the CUDA
/// context); see process_memory().
namespace reprise {

/// Starts counting CPU memory, if no meter has done so yet. Idempotent.
void count_cpu_memory();

/// Returns the bytes of all live tensors on `device`. On the CPU, only tensors
/// allocated since counting began are included.
int64_t live_bytes(c10::Device device);

/// Returns the memory that an allocation of `bytes` occupies on `device`, as
/// counted by live_bytes(): on CUDA, `bytes` rounded up to the allocator's
/// block size.
int64_t allocated_bytes(int64_t bytes, c10::Device device);

/// Counts CPU tensors that were allocated before counting began, as if they were
/// allocated now. A Trainer does this for its model. Tensors on other devices,
/// and tensors that are counted already or excluded, are ignored. Other threads
/// must not use the tensors' storages during the call.
void include_in_count(const std::vector<at::Tensor>& tensors);

/// Excludes CPU tensors from all counts for the rest of their lifetime. Meant
/// for a dataset in memory, which is not part of the memory that training uses.
/// Tensors on other devices and tensors already excluded are ignored. The
/// tensors' storages must not be resized, nor freed by another thread during
/// the call.
void exclude_from_count(const std::vector<at::Tensor>& tensors);

/// Measures the live and peak bytes of one device during its own lifetime.
///
///     MemoryMeter meter(torch::kCPU);
///     loss.backward();
///     meter.peak_increase_bytes();
///
/// Meters may nest and overlap on any threads; each has its own peak. On CUDA,
/// other code must not reset the allocator's peak statistics while a meter
/// exists.
class MemoryMeter {
 public:
  /// Throws c10::Error if `device` is neither a CPU nor a CUDA device.
  explicit MemoryMeter(c10::Device device = c10::Device(c10::kCPU));
  ~MemoryMeter();
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

  int64_t start_bytes() const;  ///< live bytes at construction or restart()
  int64_t live_bytes() const;   ///< live bytes now
  int64_t peak_bytes() const;   ///< maximum of live bytes since the start
  int64_t peak_increase_bytes() const { return peak_bytes() - start_bytes(); }

  /// Returns the maximum of bytes reserved from the CUDA driver since the
  /// start. On the CPU this is peak_bytes().
  int64_t reserved_peak_bytes() const;

  /// Resets start_bytes() and all peaks to the current values.
  void restart();

 private:
  struct Record;
  friend class DeviceMeters;
  c10::Device device_;
  std::shared_ptr<Record> record_;
};

/// Memory of this process as reported by the operating system, in bytes.
/// Besides tensors it includes code, BLAS and oneDNN scratch space, thread
/// stacks and freed memory that malloc has not returned.
struct ProcessMemory {
  int64_t rss = 0;       ///< resident set size
  int64_t rss_peak = 0;  ///< maximum since the start or the last reset
};

/// Returns the values of /proc/self/status, or zeros if it cannot be read.
ProcessMemory process_memory();

/// Returns the bytes that can be allocated on the host without swapping, or 0
/// if the system does not report them.
int64_t available_memory();

/// Returns the free bytes of `device`. For the CPU, this is available_memory().
int64_t available_memory(c10::Device device);

/// Resets `rss_peak` to the current `rss`. Returns false if the kernel does not
/// allow it.
bool reset_process_peak();

/// Returns whether `error` reports an out-of-memory condition of a CUDA device,
/// of pinned memory, of a CUDA library or of the CPU. The CPU allocator and the
/// libraries throw no specific exception type; their errors are recognized by
/// their message.
bool is_out_of_memory(const c10::Error& error);

}  // namespace reprise
