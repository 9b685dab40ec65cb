#include "recompute/no_save_scope.h"

#include <c10/util/Exception.h>

#include <memory>

namespace reprise {
namespace {

class DroppedTensor final : public compat::SavedTensorHooks {
 public:
  void call_pack_hook(const at::Tensor&) override {}
  at::Tensor call_unpack_hook() override {
    TORCH_CHECK(false,
                "[Execution] a stage that is run without saving tensors "
                "started a backward of its own");
  }
};

class DropPolicy final : public compat::SavedTensorPolicy {
 public:
  std::unique_ptr<compat::SavedTensorHooks> make_hooks() override {
    return std::make_unique<DroppedTensor>();
  }
  bool keeps() const override { return false; }
};

}  // namespace

NoSaveScope::NoSaveScope() : scope_(std::make_shared<DropPolicy>()) {}

}  // namespace reprise
