#pragma once

#include <cstdint>
#include <memory>
#include <string>

/// CUDA through LibTorch. In a build without CUDA every function is there,
/// `cuda_built()` is false, `cuda_device_count()` is 0 and the others must not be called.
namespace reprise::compat {

/// What LibTorch's caching allocator holds on one device, in bytes.
struct CudaMemory {
  int64_t allocated = 0;       ///< in tensors now
  int64_t allocated_peak = 0;  ///< most since the last reset
  int64_t reserved = 0;        ///< taken from the driver now
  int64_t reserved_peak = 0;   ///< most since the last reset
};

/// Whether this LibTorch was built with CUDA. Starts nothing.
bool cuda_built();

/// Number of CUDA devices LibTorch can use. Starts CUDA's driver: a process that
/// forks afterwards has no CUDA in its children.
int cuda_device_count();

/// Such as "0000:1b:00.0", which other tools number devices by. Takes no memory
/// on the device.
std::string cuda_pci_bus_id(int device);

CudaMemory cuda_memory(int device);
void reset_cuda_memory_peak(int device);

/// Waits for all work on `device`.
void cuda_synchronize(int device);

/// This thread's stream of the device, a cudaStream_t.
void* current_cuda_stream(int device);

/// A moment on the device's current stream. Recording does not wait.
class CudaMoment {
 public:
  explicit CudaMoment(int device);
  ~CudaMoment();
  CudaMoment(CudaMoment&&) noexcept;
  CudaMoment& operator=(CudaMoment&&) noexcept;

  /// Waits for both moments.
  double milliseconds_since(const CudaMoment& earlier) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Such as "NVIDIA H200".
std::string cuda_device_name(int device);

/// Bytes that the device has, and those that nobody uses.
struct CudaDeviceMemory {
  int64_t total = 0, free = 0;
};
CudaDeviceMemory cuda_device_memory(int device);

/// Keeps the current stream busy for about so many of the device's cycles, with nothing.
void spin_cuda(int device, int64_t cycles);

/// Gives cached, unused memory back to the driver.
void empty_cuda_cache();

/// Makes cuDNN and cuBLAS choose deterministic algorithms, where they have
/// them, for as long as the process runs.
void set_cuda_deterministic(bool deterministic);

/// What the libraries may do for speed, for as long as the process runs.
struct CudaLibraries {
  /// Products and convolutions of single precision with 10 bits of mantissa
  /// (TF32). LibTorch by itself allows it in convolutions and not in products.
  bool tf32 = false;
  /// Try the algorithms for each new shape of a convolution and take the fastest;
  /// which may take more memory, the more so while it tries.
  bool autotune = false;
};
void set_cuda_libraries(const CudaLibraries& libraries);

}  // namespace reprise::compat
