#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>
#include <vector>

/// Saved-tensor hooks for C++.
///
/// Each time autograd saves a tensor for the backward, it asks its engine for default hooks
/// to pack it with. Python implements this in an engine of its own; C++ has no interface for
/// it. When this library is loaded it installs an engine that differs from LibTorch's in
/// this one function.
namespace reprise::compat {

using SavedTensorHooks = torch::autograd::SavedVariableHooks;

/// Decides how autograd saves tensors.
class SavedTensorPolicy {
 public:
  virtual ~SavedTensorPolicy() = default;

  /// Called for each tensor that autograd is about to save. The returned hooks live as
  /// long as the graph holds the tensor; nullptr saves it as usual. Exceptions of
  /// `call_pack_hook` propagate out of the operator that saves.
  virtual std::unique_ptr<SavedTensorHooks> make_hooks() = 0;

  /// Whether the backward will use the tensors that are saved now. False if they are
  /// dropped, and recomputed if there is a backward: operators need not compute them then,
  /// but must save tensors of the same sizes and types.
  virtual bool keeps() const { return true; }

  /// Called by operators that know what they will save before they compute their output.
  /// Throws if the output is not needed: a recomputation ends with the last tensor that the
  /// backward uses.
  virtual void before_output(const std::vector<at::Tensor>& /*to_save*/) {}
};

/// Applies `policy` to the tensors saved on this thread during the lifetime of the scope.
/// Scopes nest; the innermost one applies. A null policy saves as usual. Throws c10::Error
/// if another engine than LibTorch's is installed, as in a Python process.
class SavedTensorScope {
 public:
  explicit SavedTensorScope(std::shared_ptr<SavedTensorPolicy> policy);
  ~SavedTensorScope();
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;

  /// The policy that applies on this thread; null if there is none. For policies that
  /// delegate some tensors to the enclosing scope.
  static std::shared_ptr<SavedTensorPolicy> current();

  /// SavedTensorPolicy::keeps() of the current policy; true if there is none.
  static bool keeps() {
    const auto policy = current();
    return !policy || policy->keeps();
  }

  /// SavedTensorPolicy::before_output() of the current policy.
  static void before_output(const std::vector<at::Tensor>& to_save) {
    const auto policy = current();
    if (policy) policy->before_output(to_save);
  }
};

}  // namespace reprise::compat
