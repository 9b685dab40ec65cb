#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

/// Saved-tensor hooks for C++.
///
/// Autograd asks its engine, each time it saves a tensor for the backward pass,
/// whether a pair of hooks should pack it. Python answers through its own
/// engine; C++ has no way to answer. Here an engine that differs from
/// LibTorch's in this one answer takes its place when the library is loaded.
namespace reprise::compat {

using SavedTensorHooks = torch::autograd::SavedVariableHooks;

/// Says what happens to the tensors that autograd saves.
class SavedTensorPolicy {
 public:
  virtual ~SavedTensorPolicy() = default;

  /// Called once for each tensor autograd is about to save. The returned hooks
  /// live as long as the graph holds that tensor; nullptr saves it as usual.
  /// A `call_pack_hook` that throws makes the operator that saves throw.
  virtual std::unique_ptr<SavedTensorHooks> make_hooks() = 0;
};

/// While it lives, `policy` decides for the tensors saved on this thread.
/// Scopes nest; the innermost decides. A null policy saves as usual.
/// Throws c10::Error where another engine than LibTorch's is installed (inside
/// a Python process).
class SavedTensorScope {
 public:
  explicit SavedTensorScope(std::shared_ptr<SavedTensorPolicy> policy);
  ~SavedTensorScope();
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;

  /// The policy that decides on this thread at present; null: none does. For a
  /// policy that leaves some tensors to the one around it.
  static std::shared_ptr<SavedTensorPolicy> current();
};

}  // namespace reprise::compat
