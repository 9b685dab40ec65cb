#include <reprise/memory/meter.h>

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  // Bit-identity must not depend on how work is divided among threads.
  at::set_num_threads(2);
  reprise::count_cpu_memory();
  return RUN_ALL_TESTS();
}
