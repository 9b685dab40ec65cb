#include "support.h"

#include <reprise/accumulate/small_gradients.h>

namespace reprise {
namespace {

using testing::on_device;
using testing::same;
using torch::Tensor;

struct Two {
  Tensor small, large;
};

Two make_two() {
  torch::manual_seed(2);
  const auto options = on_device(torch::kFloat);
  return {torch::randn({8}, options).requires_grad_(),
          torch::randn({40, 8}, options).requires_grad_()};
}

void backward(const Two& two, int i) {
  ((two.large * (i + 1)).sin() * two.small + two.small.cos()).sum().backward();
}

TEST(SmallGradients, SameSumsInTheSamePlaces) {
  const Two wanted = make_two();
  const Two got = make_two();
  const void* place = nullptr;
  for (int i = 0; i < 3; ++i) {
    backward(wanted, i);
    SmallGradients small({got.small, got.large}, 100);
    backward(got, i);
    // The large one is not aside: its sum is there already.
    EXPECT_TRUE(same(got.large.grad(), wanted.large.grad())) << i;
    if (i > 0) {
      EXPECT_FALSE(same(got.small.grad(), wanted.small.grad()));
    }
    small.add();
    EXPECT_TRUE(same(got.small.grad(), wanted.small.grad())) << i;
    if (i == 0) place = got.small.grad().data_ptr();
    EXPECT_EQ(got.small.grad().data_ptr(), place);
  }
}

TEST(SmallGradients, WithoutAddNothingChanges) {
  const Two two = make_two();
  backward(two, 0);
  const Tensor before = two.small.grad().clone();
  {
    const SmallGradients small({two.small}, 100);
    backward(two, 1);
  }
  EXPECT_TRUE(same(two.small.grad(), before));
}

TEST(SmallGradients, AParameterThatGotNoneKeepsItsOwn) {
  const Two two = make_two();
  backward(two, 0);
  const Tensor before = two.small.grad().clone();
  SmallGradients small({two.small, two.large}, 1000);
  small.add();
  EXPECT_TRUE(same(two.small.grad(), before));
  EXPECT_TRUE(two.large.grad().defined());
}

}  // namespace
}  // namespace reprise
