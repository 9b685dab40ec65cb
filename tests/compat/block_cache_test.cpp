#include "compat/block_cache.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cstring>
#include <thread>
#include <vector>

namespace reprise::compat {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kKeeps = false;  // a block that is kept would hide its misuse
#else
constexpr bool kKeeps = true;
#endif

TEST(BlockCache, ABlockServesTheNextRequestOfItsSize) {
  BlockCache cache;
  void* first = cache.take(2 * kMiB);
  std::memset(first, 1, 2 * kMiB);
  cache.give(first, 2 * kMiB);
  EXPECT_EQ(cache.kept_bytes(), kKeeps ? 2 * kMiB : 0);
  void* second = cache.take(2 * kMiB);
  if (kKeeps) {
    EXPECT_EQ(second, first);
  }
  EXPECT_EQ(cache.kept_bytes(), 0);
  cache.give(second, 2 * kMiB);
  cache.release();
  EXPECT_EQ(cache.kept_bytes(), 0);
}

TEST(BlockCache, NeverHoldsMoreThanWasInUseAtOnce) {
  BlockCache cache;
  int64_t used = 0, most = 0;
  std::vector<std::pair<void*, size_t>> blocks;
  for (int i = 0; i < 200; ++i) {
    // Sizes of which few repeat, taken and given in a mixed order.
    const size_t bytes = kMiB + static_cast<size_t>(i * 7919 % 64) * 4096;
    blocks.emplace_back(cache.take(bytes), bytes);
    used += static_cast<int64_t>(bytes);
    most = std::max(most, used);
    ASSERT_LE(used + cache.kept_bytes(), most);
    while (blocks.size() > static_cast<size_t>(i % 5)) {
      cache.give(blocks.back().first, blocks.back().second);
      used -= static_cast<int64_t>(blocks.back().second);
      blocks.pop_back();
      ASSERT_LE(used + cache.kept_bytes(), most);
    }
  }
  for (const auto& [block, bytes] : blocks) cache.give(block, bytes);
  cache.release();
}

TEST(BlockCache, AFailureLeavesItUsable) {
  BlockCache cache;
  cache.give(cache.take(4 * kMiB), 4 * kMiB);
  EXPECT_THROW(cache.take(size_t{1} << 60), c10::Error);
  EXPECT_EQ(cache.kept_bytes(), 0);  // given back before the second attempt
  void* block = cache.take(4 * kMiB);
  cache.give(block, 4 * kMiB);
  EXPECT_EQ(cache.kept_bytes(), kKeeps ? 4 * kMiB : 0);
  cache.release();
}

TEST(BlockCache, ThreadsShareIt) {
  BlockCache cache;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&cache, t] {
      for (int i = 0; i < 500; ++i) {
        const size_t bytes = kMiB * static_cast<size_t>(1 + i % 3);
        auto* block = static_cast<int*>(cache.take(bytes));
        *block = t;
        std::this_thread::yield();
        EXPECT_EQ(*block, t);  // nobody else has it
        cache.give(block, bytes);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  cache.release();
}

}  // namespace
}  // namespace reprise::compat
