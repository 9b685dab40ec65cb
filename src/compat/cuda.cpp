// Compiled against a LibTorch with CUDA; cuda_none.cpp replaces it otherwise.
#include "compat/cuda.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/version.h>

namespace reprise::compat {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

#if TORCH_VERSION_MAJOR > 2 || \
    (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 5)
using c10::CachingAllocator::StatType;
#else
using caching::StatType;
#endif

// The allocator has no statistics before LibTorch has initialized CUDA.
void init_cuda() {
#if TORCH_VERSION_MAJOR > 2 || \
    (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 6)
  at::globalContext().lazyInitDevice(at::kCUDA);
#else
  at::globalContext().lazyInitCUDA();
#endif
}

constexpr auto kAggregate = static_cast<size_t>(StatType::AGGREGATE);

}  // namespace

bool cuda_built() {
  return true;
}

int cuda_device_count() {
  return c10::cuda::device_count();
}

std::string cuda_pci_bus_id(int device) {
  char id[32] = {};
  C10_CUDA_CHECK(cudaDeviceGetPCIBusId(id, sizeof(id), device));
  return id;
}

CudaMemory cuda_memory(int device) {
  init_cuda();
  const auto stats =
      caching::getDeviceStats(static_cast<c10::DeviceIndex>(device));
  const auto& allocated = stats.allocated_bytes[kAggregate];
  const auto& reserved = stats.reserved_bytes[kAggregate];
  return {allocated.current, allocated.peak, reserved.current, reserved.peak};
}

void reset_cuda_memory_peak(int device) {
  init_cuda();
  caching::resetPeakStats(static_cast<c10::DeviceIndex>(device));
}

void cuda_synchronize(int device) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  c10::cuda::device_synchronize();
}

void* current_cuda_stream(int device) {
  return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device))
      .stream();
}

struct CudaEvent::Impl {
  at::cuda::CUDAEvent event{cudaEventDefault};  // with timing
};

CudaEvent::CudaEvent(int device) : impl_(std::make_unique<Impl>()) {
  impl_->event.record(
      at::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)));
}
CudaEvent::~CudaEvent() = default;
CudaEvent::CudaEvent(CudaEvent&&) noexcept = default;
CudaEvent& CudaEvent::operator=(CudaEvent&&) noexcept = default;

void CudaEvent::synchronize() const {
  impl_->event.synchronize();
}

double CudaEvent::milliseconds_since(const CudaEvent& earlier) const {
  impl_->event.synchronize();
  return earlier.impl_->event.elapsed_time(impl_->event);
}

std::string cuda_device_name(int device) {
  init_cuda();
  return at::cuda::getDeviceProperties(device)->name;
}

CudaDeviceMemory cuda_device_memory(int device) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  size_t free = 0;
  size_t total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return {static_cast<int64_t>(total), static_cast<int64_t>(free)};
}

void spin_cuda(int device, int64_t cycles) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  at::cuda::sleep(cycles);
}

void empty_cuda_cache() {
  caching::emptyCache();
}

void set_cuda_deterministic(bool deterministic) {
  at::globalContext().setDeterministicCuDNN(deterministic);
  at::globalContext().setBenchmarkCuDNN(!deterministic);
}

void set_cuda_library_options(const CudaLibraryOptions& options) {
  at::globalContext().setAllowTF32CuBLAS(options.tf32);
  at::globalContext().setAllowTF32CuDNN(options.tf32);
  at::globalContext().setBenchmarkCuDNN(options.autotune);
}

}  // namespace reprise::compat
