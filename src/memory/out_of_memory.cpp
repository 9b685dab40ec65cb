// Tested by tests/memory/failure_test.cpp.
#include <reprise/memory/meter.h>

#include <algorithm>
#include <array>
#include <string>

namespace reprise {
namespace {

constexpr std::array kTexts = {
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUDA out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
};

}  // namespace

bool is_out_of_memory(const c10::Error& error) {
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr) {
    return true;
  }
  const std::string text = error.msg();
  return std::any_of(kTexts.begin(), kTexts.end(), [&](const char* part) {
    return text.find(part) != std::string::npos;
  });
}

}  // namespace reprise
