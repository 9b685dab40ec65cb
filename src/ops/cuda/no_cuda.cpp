// Replaces the kernels in builds without nvcc: there are none, and launching one throws.
// Tested by tests/ops/kernels_test.cpp.
#include "ops/cuda/device.h"

#include <stdexcept>
#include <string>

namespace reprise::detail::kernels {
namespace {

[[noreturn]] void throw_not_built(const char* name) {
  throw std::logic_error("[" + std::string(name) +
                         "] this build has no CUDA kernels");
}

}  // namespace

bool built() {
  return false;
}

int compute_capability(int) {
  return 0;
}

int multiprocessors(int) {
  return 0;
}

}  // namespace reprise::detail::kernels

// Every launch function that a kernel's header declares becomes one that throws.
#define REPRISE_KERNEL(name, Arguments) \
  void name(const Arguments&, void*) {  \
    throw_not_built(#name);             \
  }                                     \
  static_assert(true, "takes the semicolon")

// Written by CMakeLists.txt: includes the header of every kernel.
#include <reprise_kernel_headers.h>
