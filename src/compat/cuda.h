#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>

/// CUDA functions of LibTorch. In a build without CUDA all functions exist,
/// `cuda_built()` returns false, `cuda_device_count()` returns 0 and the others
/// throw c10::Error. Tested by tests/recompute/host_memory_cuda_test.cpp.
namespace reprise::compat {

/// Statistics of LibTorch's caching allocator for one device, in bytes.
struct CudaMemory {
  int64_t allocated = 0;       ///< allocated to tensors
  int64_t allocated_peak = 0;  ///< maximum since the last reset
  int64_t reserved = 0;        ///< reserved from the driver
  int64_t reserved_peak = 0;   ///< maximum since the last reset
};

/// Returns whether this LibTorch was built with CUDA. Does not initialize CUDA.
bool cuda_built();

/// Returns the number of CUDA devices that LibTorch can use. Initializes the
/// CUDA driver, so that processes forked afterwards cannot use CUDA.
int cuda_device_count();

/// Returns the PCI bus id, such as "0000:1b:00.0", by which other tools
/// identify devices. Allocates no memory on the device.
std::string cuda_pci_bus_id(int device);

/// Return and reset the statistics of the caching allocator.
CudaMemory cuda_memory(int device);
void reset_cuda_memory_peak(int device);

/// Blocks until all work on `device` has finished.
void cuda_synchronize(int device);

/// Waits for all work on `device`; returns at once for the CPU.
inline void synchronize(c10::Device device) {
  if (device.is_cuda()) cuda_synchronize(device.index());
}

/// Returns this thread's current stream of the device, a cudaStream_t.
void* current_cuda_stream(int device);

/// An event on the device's current stream, recorded at construction. Recording
/// does not block.
class CudaEvent {
 public:
  explicit CudaEvent(int device);
  ~CudaEvent();
  CudaEvent(CudaEvent&&) noexcept;
  CudaEvent& operator=(CudaEvent&&) noexcept;

  /// Blocks until the device has reached the event.
  void synchronize() const;
  /// Returns the time between two events. Blocks until both have occurred.
  double milliseconds_since(const CudaEvent& earlier) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Returns the name of the device, such as "NVIDIA H200".
std::string cuda_device_name(int device);

/// Total and free memory of a device in bytes, as reported by the driver.
struct CudaDeviceMemory {
  int64_t total = 0, free = 0;
};
CudaDeviceMemory cuda_device_memory(int device);

/// Keeps the current stream busy for about `cycles` clock cycles of the device.
void spin_cuda(int device, int64_t cycles);

/// Returns unused cached memory to the driver.
void empty_cuda_cache();

/// Restricts cuDNN and cuBLAS to deterministic algorithms, if they have them,
/// for the rest of the process.
void set_cuda_deterministic(bool deterministic);

/// Performance options of the CUDA libraries.
struct CudaLibraryOptions {
  /// Allows TF32, with 10 bits of mantissa, in single-precision matrix products
  /// and convolutions. LibTorch's default allows it in convolutions only.
  bool tf32 = false;
  /// Benchmarks the algorithms for each new convolution shape and uses the
  /// fastest one. It may need more memory, and benchmarking needs even more.
  bool autotune = false;
};
/// Sets the options for the rest of the process.
void set_cuda_library_options(const CudaLibraryOptions& options);

}  // namespace reprise::compat
