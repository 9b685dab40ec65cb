#include "compat/cuda.h"
#include "support.h"

#include <reprise/memory/host_store.h>

namespace reprise {
namespace {

// recompute/host_memory_cuda_test.cpp tests the store itself.
TEST(HostStore, NeedsCuda) {
  if (compat::cuda_built()) GTEST_SKIP() << "this LibTorch has CUDA";
  EXPECT_NE(testing::error_of([] {
              make_host_store(0, 1 << 20);
            }).find("this LibTorch was built without CUDA"),
            std::string::npos);
}

}  // namespace
}  // namespace reprise
