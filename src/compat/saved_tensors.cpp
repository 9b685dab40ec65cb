#include "compat/saved_tensors.h"

#include "compat/cpu_isa.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>

#include <utility>
#include <vector>

namespace reprise::compat {
namespace {

using torch::autograd::Engine;

std::vector<std::shared_ptr<SavedTensorPolicy>>& policies() {
  thread_local std::vector<std::shared_ptr<SavedTensorPolicy>> stack;
  return stack;
}

class HookedEngine final : public Engine {
 public:
  // Required by the base class: stop() must run before the vtable pointer changes.
  ~HookedEngine() override { stop(); }

  std::unique_ptr<SavedTensorHooks> get_default_saved_variable_hooks()
      override {
    const auto& stack = policies();
    if (stack.empty() || !stack.back()) return nullptr;
    return stack.back()->make_hooks();
  }

  static Engine& instance() {
    static HookedEngine engine;
    return engine;
  }
};

/// Replaces LibTorch's engine with ours. Returns false if Python has installed its own.
bool install_engine() {
  amx_support();  // limits oneDNN if necessary, in every program that links this file
  if (&Engine::get_default_engine() != &Engine::get_base_engine()) return false;
  torch::autograd::set_default_engine_stub(&HookedEngine::instance);
  return true;
}

// At load, not at first use: two engines that run a backward on a GPU would compete for
// LibTorch's pool of device threads.
const bool engine_installed = install_engine();

}  // namespace

SavedTensorScope::SavedTensorScope(std::shared_ptr<SavedTensorPolicy> policy) {
  TORCH_CHECK(
      engine_installed &&
          &Engine::get_default_engine() == &HookedEngine::instance(),
      "[SavedTensorScope] expected LibTorch's own autograd engine, got "
      "another one; saved-tensor hooks from C++ cannot be used inside a "
      "Python process");
  policies().push_back(std::move(policy));
}

SavedTensorScope::~SavedTensorScope() {
  policies().pop_back();
}

std::shared_ptr<SavedTensorPolicy> SavedTensorScope::current() {
  return policies().empty() ? nullptr : policies().back();
}

}  // namespace reprise::compat
