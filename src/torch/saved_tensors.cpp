#include <reprise/torch/saved_tensors.h>

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
  // The base class asks for this call before its vtable pointer changes.
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

void install_engine_once() {
  static const bool installed = [] {
    TORCH_CHECK(&Engine::get_default_engine() == &Engine::get_base_engine(),
                "[SavedTensorScope] expected LibTorch's own autograd engine, "
                "got another one; saved-tensor hooks from C++ cannot be used "
                "inside a Python process");
    torch::autograd::set_default_engine_stub(&HookedEngine::instance);
    return true;
  }();
  (void)installed;
}

}  // namespace

SavedTensorScope::SavedTensorScope(std::shared_ptr<SavedTensorPolicy> policy) {
  install_engine_once();
  policies().push_back(std::move(policy));
}

SavedTensorScope::~SavedTensorScope() {
  policies().pop_back();
}

}  // namespace reprise::compat
