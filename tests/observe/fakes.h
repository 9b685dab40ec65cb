#pragma once

#include "environment.h"
#include "fake_nvml.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <dlfcn.h>
#include <string>

namespace reprise::testing {

/// Makes this process use a fake NVML in its initial state.
class WithFakeNvml {
 public:
  explicit WithFakeNvml(const char* library = REPRISE_FAKE_NVML)
      : nvml_("REPRISE_NVML", library),
        visible_("CUDA_VISIBLE_DEVICES", nullptr) {
    void* loaded = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (loaded == nullptr) {
      ADD_FAILURE() << dlerror();
      std::abort();
    }
    const auto state =
        reinterpret_cast<FakeNvmlState>(dlsym(loaded, "fake_nvml_state"));
    state_ = state();
    *state_ = FakeNvml();
  }
  FakeNvml* operator->() const { return state_; }

 private:
  Environment nvml_, visible_;
  FakeNvml* state_ = nullptr;
};

}  // namespace reprise::testing
