#include "compat/threads.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <atomic>
#include <thread>

namespace {

TEST(Threads, OneForTheCallerOthersAsBefore) {
  if (at::get_num_threads() < 2) GTEST_SKIP() << "LibTorch has one thread";
  if (at::get_parallel_info().find("parallel backend: OpenMP") ==
      std::string::npos) {
    GTEST_SKIP() << "LibTorch has a thread pool of its own";
  }
  const int before = at::get_num_threads();
  int inside = 0, beside = 0;
  std::thread([&] {
    reprise::compat::run_operators_on_this_thread();
    // An operator that would be divided does not bring the others back.
    torch::ones({1 << 20}).add_(1);
    inside = at::get_num_threads();
  }).join();
  std::thread([&] { beside = at::get_num_threads(); }).join();
  EXPECT_EQ(inside, 1);
  EXPECT_EQ(beside, before);
  EXPECT_EQ(at::get_num_threads(), before);
}

}  // namespace
