// Compiled instead of host_store.cpp and pinned_tensors.cpp against a LibTorch
// without CUDA.
// Tested by tests/memory/host_store_test.cpp.
#include "memory/host_tensors.h"

#include <reprise/memory/host_store.h>

#include <c10/util/Exception.h>

namespace reprise {

std::shared_ptr<HostStore> make_host_store(int, int64_t) {
  TORCH_CHECK(false, "[host_store] this LibTorch was built without CUDA");
}

std::shared_ptr<HostStore> detail::make_host_store(int,
                                                   std::shared_ptr<HostQuota>) {
  TORCH_CHECK(false, "[host_store] this LibTorch was built without CUDA");
}

std::shared_ptr<detail::HostTensors> detail::make_pinned_tensors(
    int, std::shared_ptr<HostQuota>) {
  TORCH_CHECK(false, "[host_tensors] this LibTorch was built without CUDA");
}

}  // namespace reprise
