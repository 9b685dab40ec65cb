#pragma once

#include "fake_nvml.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <dlfcn.h>
#include <optional>
#include <string>

namespace reprise::testing {

/// Sets a variable of the environment, or takes it away, until it goes.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    if (value == nullptr) {
      unsetenv(name);
    } else {
      setenv(name, value, 1);
    }
  }
  ~Environment() {
    if (before_) {
      setenv(name_, before_->c_str(), 1);
    } else {
      unsetenv(name_);
    }
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  const char* name_;
  std::optional<std::string> before_;
};

/// Makes one of the stand-ins the NVML of this process, in its first state.
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
