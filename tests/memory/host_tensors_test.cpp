#include "memory/host_tensors.h"

#include "support.h"

#include <reprise/memory/meter.h>

#include <optional>

namespace reprise::detail {
namespace {

using testing::device;

std::shared_ptr<HostTensors> host_of(std::optional<HostTensorsOnCpu>& on_cpu,
                                     int64_t limit) {
  if (device().is_cuda())
    return make_pinned_tensors(device().index(),
                               std::make_shared<HostQuota>(limit));
  on_cpu.emplace(limit, 1 << 20);
  return HostTensorsOnCpu::make();
}

TEST(HostTensors, AreZerosWithinTheLimit) {
  std::optional<HostTensorsOnCpu> on_cpu;
  const auto host = host_of(on_cpu, 5000);
  EXPECT_EQ(host->limit_bytes(), 5000);
  {
    const at::Tensor block = host->allocate(4000);
    ASSERT_TRUE(block.defined());
    EXPECT_TRUE(block.device().is_cpu());
    EXPECT_EQ(block.scalar_type(), at::kByte);
    EXPECT_EQ(block.sum().item<int64_t>(), 0);
    EXPECT_EQ(host->held_bytes(), 4000);
    EXPECT_FALSE(host->allocate(1001).defined());
    EXPECT_TRUE(host->allocate(1000).defined());
  }
  EXPECT_EQ(host->held_bytes(), 0);
  EXPECT_TRUE(host->allocate(5000).defined());
}

TEST(HostQuota, IsSharedByItsUsers) {
  HostQuota quota(100);
  EXPECT_TRUE(quota.take(60));
  EXPECT_FALSE(quota.take(41));
  EXPECT_TRUE(quota.take(40));
  EXPECT_EQ(quota.used_bytes(), 100);
  quota.give(60);
  EXPECT_TRUE(quota.take(1));
  EXPECT_EQ(quota.limit_bytes(), 100);
}

TEST(HostTensors, AreNotDeviceMemory) {
  std::optional<HostTensorsOnCpu> on_cpu;
  const auto host = host_of(on_cpu, 1 << 20);
  const MemoryMeter meter(device());
  const at::Tensor block = host->allocate(1 << 20);
  EXPECT_EQ(meter.live_bytes() - meter.start_bytes(), 0);
}

TEST(HostTensors, AreCopiedInOrder) {
  std::optional<HostTensorsOnCpu> on_cpu;
  const auto host = host_of(on_cpu, 1 << 24);
  at::Tensor block = host->allocate(1 << 20);
  block.copy_(at::arange(1 << 20).remainder(251));
  const at::Tensor expected = block.clone();
  at::Tensor buffer =
      at::zeros({1 << 20}, at::device(device()).dtype(at::kByte));
  using Direction = HostTensors::Direction;
  for (int i = 0; i < 10; ++i) {
    auto in = host->start({{buffer.data_ptr(), block.data_ptr(), 1 << 20}},
                          Direction::kToDevice, nullptr);
    host->wait(*in);
    buffer.add_(1);
    auto out = host->start({{block.data_ptr(), buffer.data_ptr(), 1 << 20}},
                           Direction::kToHost, nullptr);
    host->wait(*out);
    buffer.zero_();
  }
  host->synchronize();
  EXPECT_TRUE(testing::same(block, expected + 10));
}

}  // namespace
}  // namespace reprise::detail
