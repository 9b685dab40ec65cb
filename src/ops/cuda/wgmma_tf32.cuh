#pragma once

#include <cstdint>

/// TF32 matrix products of a warpgroup (128 threads) with the wgmma instruction of compute
/// capability 9.0. Tested by tests/ops/tf32x3_gemm_test.cpp.
namespace reprise::detail::kernels {

// clang-format off
#define REPRISE_NAMES_0_31 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, " \
  "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define REPRISE_NAMES_32_47 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, " \
  "%44, %45, %46, %47"
#define REPRISE_NAMES_48_63 \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, " \
  "%60, %61, %62, %63"
#define REPRISE_SUMS_8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
  "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define REPRISE_SUMS_32 \
  REPRISE_SUMS_8(0), REPRISE_SUMS_8(8), REPRISE_SUMS_8(16), REPRISE_SUMS_8(24)
#define REPRISE_SUMS_48 REPRISE_SUMS_32, REPRISE_SUMS_8(32), REPRISE_SUMS_8(40)
#define REPRISE_SUMS_64 REPRISE_SUMS_48, REPRISE_SUMS_8(48), REPRISE_SUMS_8(56)
// clang-format on

/// d (64, kColumns) = (add ? d : 0) + a (64, 8) b (8, kColumns) in TF32, accumulated in
/// float32. Each thread holds the fragments of a and d that PTX defines for wgmma; b is a
/// shared-memory descriptor. Asynchronous: a and d must not be accessed before
/// wait_wgmma().
template <int kColumns>
struct WgmmaTf32;

#define REPRISE_WGMMA_TF32(columns, names, sums, a0, a1, a2, a3, b0, p0)   \
  template <>                                                                  \
  struct WgmmaTf32<columns> {                                              \
    static __device__ __forceinline__ void run(float (&d)[columns / 2],        \
                                               const uint32_t* a, uint64_t b,  \
                                               int add) {                      \
      asm volatile(                                                            \
          "{\n.reg .pred add;\n"                                               \
          "setp.ne.b32 add, %" #p0 ", 0;\n"                                    \
          "wgmma.mma_async.sync.aligned.m64n" #columns                         \
          "k8.f32.tf32.tf32 {" names "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 \
          "}, %" #b0 ", add, 1, 1;\n}\n"                                       \
          : sums                                                               \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));     \
    }                                                                          \
  };
REPRISE_WGMMA_TF32(64, REPRISE_NAMES_0_31, REPRISE_SUMS_32, 32, 33, 34, 35,
                       36, 37)
REPRISE_WGMMA_TF32(96, REPRISE_NAMES_0_31 REPRISE_NAMES_32_47,
                       REPRISE_SUMS_48, 48, 49, 50, 51, 52, 53)
REPRISE_WGMMA_TF32(
    128, REPRISE_NAMES_0_31 REPRISE_NAMES_32_47 REPRISE_NAMES_48_63,
    REPRISE_SUMS_64, 64, 65, 66, 67, 68, 69)

/// Must be called after other instructions wrote to `d` and before the first product.
template <int kCount>
__device__ __forceinline__ void begin_wgmma(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}
/// Must be called after the last product. Does not wait.
__device__ __forceinline__ void commit_wgmma() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
/// Waits for the committed products.
template <int kCount>
__device__ __forceinline__ void wait_wgmma(float (&d)[kCount]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;\n" ::: "memory");
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// Descriptor of a tile of b in shared memory. The tile has one line of 32 values per
/// column, along the depth, in groups of eight lines at multiples of 1,024 bytes, with the
/// 128-byte swizzle: chunk c (four values) of line l is stored at c xor l % 8, see
/// swizzle_of(). Adding 2 to the descriptor advances it by 8 values along the depth.
__device__ __forceinline__ uint64_t descriptor_of(const float* tile) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(tile));
  constexpr uint64_t kGroup = 1024 >> 4, kSwizzle128 = 1;
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | uint64_t{1} << 16 |
         kGroup << 32 | kSwizzle128 << 62;
}
/// Offset of a chunk of four values in such a tile.
__device__ __forceinline__ int swizzle_of(int line, int chunk) {
  return line * 32 + (chunk ^ line % 8) * 4;
}

}  // namespace reprise::detail::kernels
