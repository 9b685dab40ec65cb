#include "memory_limit.h"

#include "base/memory_limit.h"

#include <reprise/base/bytes.h>

#include <c10/util/Exception.h>
#include <torch/utils.h>

namespace reprise::command {

void apply_memory_limit() {
  const int64_t limit = memory_limit_from_environment();
  if (limit == 0) return;
  // Large enough for all threads of the BLAS, each of which allocates a buffer.
  constexpr int64_t kSize = 512;
  {
    const torch::NoGradGuard no_grad;
    const torch::Tensor a = torch::ones({kSize, kSize});
    (void)torch::mm(a, a);
  }
  const int64_t used = limited_memory_bytes();
  TORCH_CHECK_WITH(
      OutOfMemoryError, used < limit,
      "[memory] out of memory: the program and its libraries take ",
      format_bytes(used), " before the run begins, the limit is ",
      format_bytes(limit));
  limit_memory(limit);
}

}  // namespace reprise::command
