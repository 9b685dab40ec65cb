// Stands in for cuda.cpp where LibTorch has no CUDA.
#include "compat/cuda.h"
#include "compat/no_graphs.h"
#include "compat/side_stream.h"

#include <c10/util/Exception.h>

namespace reprise::compat {
namespace {

[[noreturn]] void no_cuda() {
  TORCH_CHECK(false,
              "[cuda] expected a LibTorch built with CUDA, got a CPU-only one; "
              "name another with REPRISE_TORCH and build again");
}

}  // namespace

bool cuda_built() {
  return false;
}

int cuda_device_count() {
  return 0;
}

std::string cuda_pci_bus_id(int) {
  no_cuda();
}

CudaMemory cuda_memory(int) {
  no_cuda();
}

void reset_cuda_memory_peak(int) {
  no_cuda();
}

void cuda_synchronize(int) {
  no_cuda();
}

void* current_cuda_stream(int) {
  no_cuda();
}

struct CudaMoment::Impl {};
CudaMoment::CudaMoment(int) {
  no_cuda();
}
CudaMoment::~CudaMoment() = default;
CudaMoment::CudaMoment(CudaMoment&&) noexcept = default;
CudaMoment& CudaMoment::operator=(CudaMoment&&) noexcept = default;
double CudaMoment::milliseconds_since(const CudaMoment&) const {
  no_cuda();
}

std::string cuda_device_name(int) {
  no_cuda();
}

CudaDeviceMemory cuda_device_memory(int) {
  no_cuda();
}

void spin_cuda(int, int64_t) {}
void empty_cuda_cache() {}

void set_cuda_deterministic(bool) {}

void set_cuda_libraries(const CudaLibraries&) {}

void run_on_side_stream(std::vector<at::Tensor>,
                        const std::function<void()>& work) {
  work();
}

CaptureExpected::CaptureExpected(bool expected) : expected_(expected) {}
CaptureExpected::~CaptureExpected() = default;

void reset_side_streams() {}

std::string cuda_graph_refusal() {
  return "this LibTorch has no CUDA";
}

}  // namespace reprise::compat
