// Compiled instead of cuda.cpp against a LibTorch without CUDA.
// Tested by tests/observe/devices_test.cpp.
#include "compat/cuda.h"
#include "compat/cuda_graph_none.h"
#include "compat/side_stream.h"
#include "compat/work_lane.h"

#include <c10/util/Exception.h>

namespace reprise::compat {
namespace {

[[noreturn]] void no_cuda() {
  TORCH_CHECK(false,
              "[cuda] expected a LibTorch built with CUDA, got a CPU-only one; "
              "set REPRISE_TORCH to another one and rebuild");
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

struct CudaEvent::Impl {};
CudaEvent::CudaEvent(int) {
  no_cuda();
}
CudaEvent::~CudaEvent() = default;
CudaEvent::CudaEvent(CudaEvent&&) noexcept = default;
CudaEvent& CudaEvent::operator=(CudaEvent&&) noexcept = default;
void CudaEvent::synchronize() const {
  no_cuda();
}
double CudaEvent::milliseconds_since(const CudaEvent&) const {
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

void set_cuda_library_options(const CudaLibraryOptions&) {}

void run_on_side_stream(std::vector<at::Tensor>,
                        const std::function<void()>& work) {
  work();
}

CaptureExpected::CaptureExpected(bool expected) : expected_(expected) {}
CaptureExpected::~CaptureExpected() = default;

void reset_side_streams() {}

std::string cuda_graph_unavailable_reason() {
  return "this LibTorch has no CUDA";
}

std::unique_ptr<WorkLane> make_work_lane(at::Device) {
  return std::make_unique<ImmediateLane>();
}

}  // namespace reprise::compat
