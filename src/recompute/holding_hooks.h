#pragma once

#include "compat/saved_tensors.h"
#include "recompute/stage_checks.h"

#include <c10/util/Exception.h>
#include <torch/types.h>

#include <cstdint>

/// Tested by tests/recompute/keep_test.cpp.
namespace reprise::detail {

/// Holds a tensor if no other hooks do.
class HoldingHooks final : public compat::SavedTensorHooks {
 public:
  void call_pack_hook(const at::Tensor& tensor) override {
    // Detached, because an operator's own output refers to its node, and the
    // node to this hook: a reference cycle.
    tensor_ = tensor.detach();
    version_ = version_of(tensor_);
  }
  at::Tensor call_unpack_hook() override {
    // Autograd does not check the version of tensors saved through hooks.
    TORCH_CHECK(version_of(tensor_) == version_,
                "[checkpoint] a tensor of shape ", tensor_.sizes(),
                " that was saved for backward was modified in place "
                "afterwards; use an out-of-place operator");
    return tensor_;
  }

 private:
  at::Tensor tensor_;
  int64_t version_ = 0;
};

}  // namespace reprise::detail
