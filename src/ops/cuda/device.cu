#include "device.h"

#include <cuda_runtime.h>

namespace reprise::detail::kernels {
namespace {

int attribute_of(cudaDeviceAttr attribute, int device) {
  int value = 0;
  return cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess
             ? value
             : 0;
}

}  // namespace

bool built() {
  return true;
}

int compute_capability(int device) {
  return 10 * attribute_of(cudaDevAttrComputeCapabilityMajor, device) +
         attribute_of(cudaDevAttrComputeCapabilityMinor, device);
}

int multiprocessors(int device) {
  return attribute_of(cudaDevAttrMultiProcessorCount, device);
}

}  // namespace reprise::detail::kernels
