#pragma once

#include <cstdint>

/// Products of a warpgroup (128 threads) on tensor cores, of compute capability 9.0.
namespace reprise::kernels {

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

/// d (64, kColumns) = (add ? d : 0) + a (64, 8) b (8, kColumns) in TF32 with sums of
/// single precision. Of a and d a thread has what PTX's wgmma says; b is a descriptor
/// of shared memory. Asynchronous: d and a are not to be touched before
/// finish_products().
template <int kColumns>
struct TensorProduct;

#define REPRISE_TENSOR_PRODUCT(columns, names, sums, a0, a1, a2, a3, b0, p0)   \
  template <>                                                                  \
  struct TensorProduct<columns> {                                              \
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
REPRISE_TENSOR_PRODUCT(64, REPRISE_NAMES_0_31, REPRISE_SUMS_32, 32, 33, 34, 35,
                       36, 37)
REPRISE_TENSOR_PRODUCT(96, REPRISE_NAMES_0_31 REPRISE_NAMES_32_47,
                       REPRISE_SUMS_48, 48, 49, 50, 51, 52, 53)
REPRISE_TENSOR_PRODUCT(
    128, REPRISE_NAMES_0_31 REPRISE_NAMES_32_47 REPRISE_NAMES_48_63,
    REPRISE_SUMS_64, 64, 65, 66, 67, 68, 69)

/// Before the first product after others wrote to the registers of `d`.
template <int kCount>
__device__ __forceinline__ void begin_products(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}
/// After the last one; they run on.
__device__ __forceinline__ void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
/// Waits for them.
template <int kCount>
__device__ __forceinline__ void finish_products(float (&d)[kCount]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;\n" ::: "memory");
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// Of b in shared memory: lines of 32 values along the depth, one a column, in groups of
/// eight lines at addresses that are multiples of 1,024; in line l the chunk of four
/// values c is where c xor l % 8 would be (swizzle_of()). Eight values further along
/// the depth are 2 more.
__device__ __forceinline__ uint64_t descriptor_of(const float* tile) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(tile));
  constexpr uint64_t kGroup = 1024 >> 4, kSwizzle128 = 1;
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | uint64_t{1} << 16 |
         kGroup << 32 | kSwizzle128 << 62;
}
/// Where a chunk of four values of a line begins in such a tile.
__device__ __forceinline__ int swizzle_of(int line, int chunk) {
  return line * 32 + (chunk ^ line % 8) * 4;
}

}  // namespace reprise::kernels
