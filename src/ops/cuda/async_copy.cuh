#pragma once

/// Asynchronous copies from global to shared memory, which a thread waits for in groups.
/// Plain copies below compute capability 8.0. Tested by tests/ops/half_cross_entropy_test.cpp.
namespace reprise::detail::kernels {

/// Starts to copy 16 bytes, aligned, to shared memory.
inline __device__ void copy_async(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global)
               : "memory");
#else
  *static_cast<uint4*>(shared) = *static_cast<const uint4*>(global);
#endif
}
/// Makes a group of the copies that this thread has started since the last call.
inline __device__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
/// Waits until at most `pending` of this thread's groups of copies, or fewer, are left.
inline __device__ void wait_for_copies([[maybe_unused]] int pending) {
#if __CUDA_ARCH__ >= 800
  switch (pending) {
    case 0:
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      break;
    case 1:
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      break;
    case 2:
      asm volatile("cp.async.wait_group 2;" ::: "memory");
      break;
    default:
      asm volatile("cp.async.wait_group 3;" ::: "memory");
  }
#endif
}

}  // namespace reprise::detail::kernels
