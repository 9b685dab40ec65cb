#include "compat/saved_tensors.h"

#include "support.h"

#include <torch/autograd.h>

#include <thread>

namespace reprise::compat {
namespace {

/// Doubles what is saved, which shows in the gradient.
class Doubling final : public SavedTensorPolicy {
 public:
  std::unique_ptr<SavedTensorHooks> make_hooks() override {
    struct Hooks final : SavedTensorHooks {
      void call_pack_hook(const at::Tensor& tensor) override {
        value = tensor.detach() * 2;
      }
      at::Tensor call_unpack_hook() override { return value; }
      at::Tensor value;
    };
    ++count;
    return std::make_unique<Hooks>();
  }
  int count = 0;
};

float gradient_of_square(float at) {
  auto x = torch::full({}, at, torch::requires_grad());
  return torch::autograd::grad({x.square()}, {x})[0].item<float>();
}

TEST(SavedTensors, PolicyDecidesInsideItsScopeOnly) {
  EXPECT_EQ(gradient_of_square(3), 6);
  auto policy = std::make_shared<Doubling>();
  {
    const SavedTensorScope scope(policy);
    EXPECT_EQ(gradient_of_square(3), 12);
  }
  EXPECT_EQ(policy->count, 1);
  EXPECT_EQ(gradient_of_square(3), 6);
}

TEST(SavedTensors, InnermostScopeDecides) {
  const SavedTensorScope outer(std::make_shared<Doubling>());
  {
    const SavedTensorScope inner(nullptr);
    EXPECT_EQ(gradient_of_square(3), 6);
  }
  EXPECT_EQ(gradient_of_square(3), 12);
}

TEST(SavedTensors, InnermostScopeTellsWhetherTensorsAreKept) {
  class Dropping final : public SavedTensorPolicy {
    std::unique_ptr<SavedTensorHooks> make_hooks() override { return nullptr; }
    bool keeps() const override { return false; }
  };
  EXPECT_TRUE(SavedTensorScope::keeps());
  const SavedTensorScope dropping(std::make_shared<Dropping>());
  EXPECT_FALSE(SavedTensorScope::keeps());
  {
    const SavedTensorScope inner(std::make_shared<Doubling>());
    EXPECT_TRUE(SavedTensorScope::keeps());
  }
  EXPECT_FALSE(SavedTensorScope::keeps());
}

TEST(SavedTensors, ScopeBelongsToItsThread) {
  const SavedTensorScope scope(std::make_shared<Doubling>());
  float elsewhere = 0;
  std::thread([&] { elsewhere = gradient_of_square(3); }).join();
  EXPECT_EQ(elsewhere, 6);
}

}  // namespace
}  // namespace reprise::compat
