#include "support.h"

#include <reprise/memory/kept.h>

namespace reprise {
namespace {

using testing::on_device;

constexpr int64_t kSide = 1024;
constexpr int64_t kSquareBytes = kSide * kSide * 4;

torch::Tensor square_matrix() {
  return torch::randn({kSide, kSide}, on_device());
}

TEST(Kept, CountsSavedTensorsUntilTheGraphFreesThem) {
  const KeptMeter meter;
  auto x = square_matrix().requires_grad_();
  torch::Tensor y;
  {
    const KeptMeter::Scope scope(meter, 0);
    y = x.exp().sum();  // saves its result
  }
  EXPECT_EQ(meter.live_bytes(), kSquareBytes);
  y.backward();
  EXPECT_EQ(meter.live_bytes(), 0);
  EXPECT_EQ(meter.peak_bytes(), kSquareBytes);
}

TEST(Kept, SharedStorageCountsOnceForTheLowestStage) {
  const KeptMeter meter;
  const auto x = square_matrix().requires_grad_();
  torch::Tensor a, b;
  {
    const KeptMeter::Scope scope(meter, 2);
    a = x * x.t();  // two views of one storage
  }
  EXPECT_EQ(meter.live_bytes(), kSquareBytes);
  EXPECT_EQ(meter.live_by_stage(), (std::vector<int64_t>{0, 0, kSquareBytes}));
  {
    const KeptMeter::Scope scope(meter, 1);
    b = x.square();
  }
  EXPECT_EQ(meter.live_bytes(), kSquareBytes);
  EXPECT_EQ(meter.live_by_stage(), (std::vector<int64_t>{0, kSquareBytes, 0}));
  b.reset();
  EXPECT_EQ(meter.live_by_stage(), (std::vector<int64_t>{0, 0, kSquareBytes}));
}

TEST(Kept, IgnoresParametersAndTheirViews) {
  torch::nn::Linear linear(kSide, kSide);
  linear->to(testing::device());
  const KeptMeter meter(linear->parameters());
  const auto x = square_matrix();
  torch::Tensor y;
  {
    const KeptMeter::Scope scope(meter, 0);
    y = linear(x);  // saves x, and a transposed view of the weight
  }
  EXPECT_EQ(meter.live_bytes(), kSquareBytes);
}

TEST(Kept, HoldCountsATensor) {
  const KeptMeter meter;
  const auto x = square_matrix();
  auto first = meter.hold(x, 0);
  const auto second = meter.hold(x.t(), 3);
  EXPECT_EQ(meter.live_bytes(), kSquareBytes);
  first.reset();
  EXPECT_EQ(meter.live_by_stage().at(3), kSquareBytes);
  EXPECT_EQ(meter.peak_bytes(), kSquareBytes);
}

TEST(Kept, DetectsInPlaceModifications) {
  const KeptMeter meter;
  auto x = torch::ones({3}, on_device()).requires_grad_();
  torch::Tensor y, z;
  {
    const KeptMeter::Scope scope(meter, 4);
    y = x * 2;
    z = y.square();  // saves y
  }
  y.add_(1);
  EXPECT_NE(testing::error_of([&] {
              z.sum().backward();
            }).find("stage 4 saved for backward was modified in place"),
            std::string::npos);
}

TEST(Kept, OutputSavedByItsOwnNodeIsFreedWithTheGraph) {
  const KeptMeter meter;
  auto x = square_matrix().requires_grad_();
  {
    const KeptMeter::Scope scope(meter, 0);
    x.exp();
  }
  EXPECT_EQ(meter.live_bytes(), 0);
}

}  // namespace
}  // namespace reprise
