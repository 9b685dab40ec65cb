#include "memory/failure.h"

#include "compat/reserved_scope.h"
#include "support.h"

#include <reprise/memory/meter.h>

#include <limits>
#include <thread>

namespace reprise {
namespace {

using testing::error_of;

/// Returns the number of the first allocation of `bytes` that fails.
int first_failing(int64_t bytes, int most) {
  for (int i = 0; i < most; ++i) {
    try {
      torch::empty({bytes}, torch::kUInt8);
    } catch (const c10::Error&) {
      return i;
    }
  }
  return -1;
}

TEST(Failure, FailsExactlyTheRequestedAllocation) {
  const int64_t before = live_bytes(torch::kCPU);
  for (const int after : {0, 3, 9}) {
    const AllocationFailure failure(after);
    EXPECT_FALSE(failure.happened());
    EXPECT_EQ(first_failing(1, 20), after);
    EXPECT_TRUE(failure.happened());
    EXPECT_EQ(first_failing(1, 20), -1);
    EXPECT_EQ(failure.counted(), after + 21);
  }
  EXPECT_EQ(first_failing(1, 20), -1);
  EXPECT_EQ(live_bytes(torch::kCPU), before);
}

TEST(Failure, IgnoresSmallAndReservedAllocations) {
  const AllocationFailure failure(1, 100);
  EXPECT_EQ(first_failing(99, 5), -1);
  {
    const compat::ReservedScope reserved;
    EXPECT_EQ(first_failing(100, 5), -1);
  }
  EXPECT_EQ(failure.counted(), 0);
  EXPECT_EQ(first_failing(100, 5), 1);
}

TEST(Failure, CountsAllocationsOfAllThreads) {
  const AllocationFailure failure(2);
  EXPECT_EQ(first_failing(8, 2), -1);
  int failed = -1;
  std::thread([&] { failed = first_failing(8, 2); }).join();
  EXPECT_EQ(failed, 0);
}

TEST(Failure, AllowsOneInstance) {
  const AllocationFailure failure(0, 1 << 30);
  EXPECT_NE(
      error_of([] { AllocationFailure(0); }).find("already being injected"),
      std::string::npos);
}

TEST(Failure, InjectedAndRealFailuresAreRecognized) {
  const auto recognised = [](auto&& body) {
    try {
      body();
    } catch (const c10::Error& error) {
      return is_out_of_memory(error);
    }
    ADD_FAILURE() << "nothing was thrown";
    return false;
  };
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  // Sanitizers terminate the process instead.
  EXPECT_TRUE(recognised([] {
    torch::empty({std::numeric_limits<int64_t>::max() / 4}, torch::kUInt8);
  }));
#endif
  EXPECT_TRUE(recognised([] {
    const AllocationFailure failure(0);
    torch::ones({2, 2});
  }));
  EXPECT_TRUE(recognised(
      [] { C10_THROW_ERROR(OutOfMemoryError, "CUDA out of memory."); }));
  // In a backward pass, which runs on other threads.
  EXPECT_TRUE(recognised([] {
    const auto x = torch::ones({64, 64}, torch::requires_grad());
    const auto loss = x.tanh().square().sum();
    const AllocationFailure failure(2);
    loss.backward();
  }));
  EXPECT_FALSE(recognised([] { torch::ones({2}) + torch::ones({3}); }));
}

}  // namespace
}  // namespace reprise
