#include "compat/work_lane.h"

#include "support.h"

namespace reprise {
namespace {

using testing::on_device;
using torch::Tensor;

TEST(WorkLane, RunsInOrder) {
  const auto lane = compat::make_work_lane(testing::device());
  Tensor sum = torch::zeros({1 << 20}, on_device());
  for (int i = 0; i < 20; ++i) {
    const Tensor one = torch::ones({1 << 20}, on_device());  // of this stream
    lane->run({sum, one}, [&] { sum += one; });
    lane->join(1);
  }
  lane->join(0);
  EXPECT_EQ(sum.min().item<float>(), 20);
  EXPECT_EQ(sum.max().item<float>(), 20);
}

TEST(WorkLane, CanBeEntered) {
  const auto lane = compat::make_work_lane(testing::device());
  Tensor values = torch::zeros({1 << 20}, on_device());
  lane->run({values}, [&] { values += 1; });
  {
    const auto inside = lane->enter();
    values *= 3;
  }
  lane->run({values}, [&] { values += 1; });
  lane->join(0);
  EXPECT_EQ(values.min().item<float>(), 4);
}

TEST(WorkLane, PropagatesErrors) {
  const auto lane = compat::make_work_lane(testing::device());
  EXPECT_THROW(lane->run({}, [] { throw std::runtime_error("no"); }),
               std::runtime_error);
  lane->join(0);
  Tensor values = torch::zeros({1}, on_device());
  lane->run({values}, [&] { values += 1; });
  lane->join(0);
  EXPECT_EQ(values.item<float>(), 1);
}

}  // namespace
}  // namespace reprise
