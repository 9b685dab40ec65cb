#include "support.h"

#include <reprise/memory/meter.h>

#include <atomic>
#include <thread>
#include <vector>

namespace reprise {
namespace {

using testing::device;
using testing::on_device;

constexpr int64_t kMiB = 1 << 20;

torch::Tensor mib(int64_t count) {
  return torch::empty({count * kMiB}, on_device(torch::kByte));
}

TEST(Meter, CountsLiveAndPeakExactly) {
  const MemoryMeter meter(device());
  const int64_t start = meter.start_bytes();
  auto a = mib(3);
  {
    auto b = mib(5);
    EXPECT_EQ(meter.live_bytes() - start, 8 * kMiB);
  }
  EXPECT_EQ(meter.live_bytes() - start, 3 * kMiB);
  EXPECT_EQ(meter.peak_increase_bytes(), 8 * kMiB);
  a.reset();
  EXPECT_EQ(meter.live_bytes(), start);
}

TEST(Meter, CountsOddSizesAndEmptyTensorsOnTheCpu) {
  const MemoryMeter meter(torch::kCPU);
  const auto a = torch::empty({7}, torch::kByte);
  EXPECT_EQ(meter.live_bytes() - meter.start_bytes(), 7);
  const auto none = torch::empty({0});
  EXPECT_EQ(meter.live_bytes() - meter.start_bytes(), 7);
  // The header in front of the data must not change the alignment.
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a.data_ptr()) % 64, 0u);
}

TEST(Meter, NestedAndOverlappingMetersHaveTheirOwnPeaks) {
  MemoryMeter outer(device());
  { mib(10); }
  auto middle = std::make_unique<MemoryMeter>(device());
  auto kept = mib(2);
  {
    const MemoryMeter inner(device());
    mib(4);
    EXPECT_EQ(inner.peak_increase_bytes(), 4 * kMiB);
  }
  EXPECT_EQ(middle->peak_increase_bytes(), 6 * kMiB);
  MemoryMeter later(device());
  middle.reset();  // not the innermost one
  { mib(1); }
  EXPECT_EQ(later.peak_increase_bytes(), 1 * kMiB);
  EXPECT_EQ(outer.peak_increase_bytes(), 10 * kMiB);
  outer.restart();
  EXPECT_EQ(outer.peak_increase_bytes(), 0);
}

TEST(Meter, ReservedIsAtLeastThePeak) {
  const MemoryMeter meter(device());
  mib(16);
  EXPECT_GE(meter.reserved_peak_bytes(), meter.peak_bytes());
}

TEST(Meter, CountsAllocationsOfManyThreads) {
  const MemoryMeter meter(torch::kCPU);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 2000; ++i) {
        const auto a = torch::empty({1000}, torch::kByte);
        const auto b = torch::empty({500}, torch::kByte);
      }
    });
  }
  std::thread reader([&] {
    while (!stop) {
      const MemoryMeter inner(torch::kCPU);
      EXPECT_GE(inner.peak_increase_bytes(), 0);
    }
  });
  for (auto& thread : threads) thread.join();
  stop = true;
  reader.join();
  EXPECT_EQ(meter.live_bytes(), meter.start_bytes());
  EXPECT_GE(meter.peak_increase_bytes(), 1500);
  EXPECT_LE(meter.peak_increase_bytes(), 4 * 1500);
}

TEST(Meter, CountsTensorsThatExistedBefore) {
  // Memory of another allocator stands for memory from before the first meter.
  const auto foreign = [](int64_t count) {
    auto* bytes = new char[static_cast<size_t>(count)];
    return torch::from_blob(
        bytes, {count}, [bytes](void*) { delete[] bytes; }, torch::kByte);
  };
  const MemoryMeter meter(torch::kCPU);
  const auto more = [&] { return meter.live_bytes() - meter.start_bytes(); };
  auto tensor = foreign(1000);
  tensor.fill_(7);
  EXPECT_EQ(more(), 0);
  const auto view = tensor.slice(0, 10, 20);
  include_in_count({tensor, view});
  include_in_count({tensor});  // once only
  EXPECT_EQ(more(), 1000);
  EXPECT_EQ(tensor.sum().item<int64_t>(), 7000);
  auto counted = torch::empty({500}, torch::kByte);
  include_in_count({counted});
  EXPECT_EQ(more(), 1500);
  exclude_from_count({tensor});
  EXPECT_EQ(more(), 500);
  include_in_count({tensor});
  EXPECT_EQ(more(), 500);  // excluded for the rest of its life
  auto other = foreign(200);
  include_in_count({other});
  EXPECT_EQ(more(), 700);
  other.reset();
  counted.reset();
  EXPECT_EQ(more(), 0);
}

TEST(Meter, RejectsOtherDevices) {
  EXPECT_NE(testing::error_of([] {
              MemoryMeter meter(torch::kMeta);
            }).find("expected a CPU or CUDA device"),
            std::string::npos);
}

}  // namespace
}  // namespace reprise
