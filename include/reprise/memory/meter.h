#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <vector>

/// Bytes counted where they are allocated.
///
/// On the CPU a counting allocator takes the place of LibTorch's when the first
/// meter is made (or `count_cpu_memory()` is called) and counts every tensor
/// made since, exactly. On CUDA the figures are the caching allocator's, which
/// rounds blocks up to 512 bytes. Memory that libraries take past LibTorch
/// (BLAS and oneDNN scratch, the CUDA context) is in neither: see process.h.
namespace reprise {

/// Starts counting on the CPU now, instead of at the first meter. Idempotent.
void count_cpu_memory();

/// Bytes in tensors on `device` now; on the CPU, of those made since counting
/// began.
int64_t live_bytes(c10::Device device);

/// What a tensor of so many bytes takes of `device`, as live_bytes() counts it.
int64_t allocated_bytes(int64_t bytes, c10::Device device);

/// Leaves CPU tensors out of every count from now on, for as long as they live: a
/// dataset that happens to be resident is no part of a training's memory. Tensors on
/// other devices, and those left out already, are ignored. The tensors must own their
/// storages for good; nobody may free them at the same time.
void exclude_from_count(const std::vector<at::Tensor>& tensors);

/// Live and peak bytes on one device over its own lifetime.
///
///     MemoryMeter meter(torch::kCPU);
///     loss.backward();
///     meter.peak_increase_bytes();
///
/// Meters may nest and overlap, on any threads; each has a peak of its own.
/// On CUDA nobody else should reset the allocator's peak while one lives.
class MemoryMeter {
 public:
  explicit MemoryMeter(c10::Device device = c10::Device(c10::kCPU));
  ~MemoryMeter();
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

  int64_t start_bytes() const;  ///< live when it was made, or restarted
  int64_t live_bytes() const;
  int64_t peak_bytes() const;  ///< most live at one moment since the start
  int64_t peak_increase_bytes() const { return peak_bytes() - start_bytes(); }

  /// Most bytes reserved from the driver; on the CPU the same as peak_bytes().
  int64_t reserved_peak_bytes() const;

  /// Begins again from the present moment.
  void restart();

 private:
  struct Record;
  friend class DeviceMeters;
  c10::Device device_;
  std::shared_ptr<Record> record_;
};

}  // namespace reprise
