#include "support.h"

#include <reprise/memory/meter.h>

#include <cstring>
#include <sys/mman.h>

namespace reprise {
namespace {

TEST(ProcessMemory, PeakRisesAndResets) {
  constexpr size_t kBytes = size_t{200} << 20;
  const auto before = process_memory();
  EXPECT_GT(before.rss, 0);
  EXPECT_GE(before.rss_peak, before.rss);
  {
    // Mapped directly, because an allocator may keep freed memory.
    void* block = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(block, MAP_FAILED);
    std::memset(block, 1, kBytes);
    EXPECT_GT(process_memory().rss, before.rss + 150 * (1 << 20));
    munmap(block, kBytes);
  }
  EXPECT_GT(process_memory().rss_peak, before.rss + 150 * (1 << 20));
  if (reset_process_peak()) {
    EXPECT_LT(process_memory().rss_peak, before.rss + 100 * (1 << 20));
  }
}

TEST(ProcessMemory, ReportsAvailableMemory) {
  // Positive, and less than any machine has.
  EXPECT_GT(available_memory(), int64_t{1} << 20);
  EXPECT_LT(available_memory(), int64_t{1} << 50);
}

}  // namespace
}  // namespace reprise
