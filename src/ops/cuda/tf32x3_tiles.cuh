#pragma once

#include "wgmma_tf32.cuh"

#include <cuda_runtime.h>

#include <cstdint>

/// Loads the operands of tf32x3_gemm.cu into shared memory: a unchanged, b split into the
/// big and small halves of its values. Tested by tests/ops/tf32x3_gemm_test.cpp.
namespace reprise::detail::kernels {

// A block computes 128 rows and 64, 96 or 128 columns of the result, in steps of 32 along
// the depth. Two warpgroups multiply 64 rows each (consumers); a third one loads the
// operands (producers).
constexpr int kRows = 128;
constexpr int kDepth = 32;
constexpr int kConsumers = 256;
constexpr int kProducers = 128;

__device__ __forceinline__ uint32_t address_of(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

/// Copies 16 bytes to shared memory asynchronously; zeros unless `there`.
__device__ __forceinline__ void copy16(float* to, const float* from,
                                       bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(
                   address_of(to)),
               "l"(from), "r"(there ? 16 : 0));
}
__device__ __forceinline__ void end_copies() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}
template <int kGroups>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kGroups) : "memory");
}

/// A reusable mbarrier: some threads arrive, others wait for all of them.
struct Barrier {
  uint64_t word;

  __device__ void init(int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(
                     address_of(&word)),
                 "r"(count));
  }
  __device__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(
                     address_of(&word))
                 : "memory");
  }
  /// Waits until all threads have arrived for the `round`-th time.
  __device__ void wait(int round) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "AGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\n"
        "bra AGAIN;\n"
        "DONE:\n}\n" ::"r"(address_of(&word)),
        "r"(round & 1)
        : "memory");
  }
};

/// Splits x into its first 11 bits, rounded, and the remainder: x = big + small up to the
/// last bit. Tensor cores ignore the bits of `small` that TF32 does not have.
__device__ __forceinline__ void split(float x, uint32_t& big, uint32_t& small) {
  big = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
  small = __float_as_uint(x - __uint_as_float(big));
}

/// A tile of a, in lines along the depth (kAlong) or along the rows. Lines are padded so
/// that the threads of a warp read from different banks.
template <bool kAlong>
struct TileA {
  static constexpr int kStride = kAlong ? kDepth + 4 : kRows + 8;
  static constexpr int kSize = (kAlong ? kRows : kDepth) * kStride;

  /// `from`: first element of the tile. Elements outside of the matrix become zero.
  static __device__ void load(float* to, const float* from, uint32_t ld,
                              int rows, int depth, int thread) {
    constexpr int kChunks = (kAlong ? kDepth : kRows) / 4;  // per line
    constexpr int kLines = kProducers / kChunks;             // per iteration
    const int at = thread % kChunks * 4;
#pragma unroll
    for (int i = 0; i < kRows * kDepth / 4 / kProducers; ++i) {
      const int line = thread / kChunks + i * kLines;
      const bool there =
          kAlong ? line < rows && at < depth : at < rows && line < depth;
      copy16(to + line * kStride + at, from + (there ? line * ld + at : 0u),
             there);
    }
  }
  static __device__ float value(const float* tile, int row, int depth) {
    return kAlong ? tile[row * kStride + depth] : tile[depth * kStride + row];
  }
};

/// A tile of b, which is split in registers on its way to shared memory.
template <int kColumns, bool kAlong>
struct TileB {
  static constexpr int kChunks = kColumns * kDepth / 4 / kProducers;
  float values[4 * kChunks];

  /// Column of the i-th chunk, four values along the depth.
  static __device__ int column(int i, int thread) {
    return kAlong ? i * (kProducers / 8) + thread / 8
                  : (i * kProducers + thread) % kColumns;
  }
  /// Index of the i-th chunk among the eight of its column.
  static __device__ int chunk(int i, int thread) {
    return kAlong ? thread % 8 : (i * kProducers + thread) / kColumns;
  }

  __device__ void load(const float* from, uint32_t ld, int columns, int depth,
                       int thread) {
    if constexpr (kAlong) {
      const int first = thread / 8, d = thread % 8 * 4;
      const float* source = from + (first * ld + d);
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        float4 four = make_float4(0, 0, 0, 0);
        if (column(i, thread) < columns && d < depth) {
          four = __ldg(reinterpret_cast<const float4*>(source));
        }
        values[4 * i] = four.x;
        values[4 * i + 1] = four.y;
        values[4 * i + 2] = four.z;
        values[4 * i + 3] = four.w;
        source += kProducers / 8 * ld;
      }
      return;
    }
    // If all chunks have the same column, one address moves along the depth.
    constexpr bool kRepeat = kProducers % kColumns == 0;
    constexpr int kDown = 4 * (kProducers / kColumns);
    const float* source = from + (chunk(0, thread) * 4 * ld + column(0, thread));
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int c = column(kRepeat ? 0 : i, thread);
      const int d = kRepeat ? chunk(0, thread) * 4 + i * kDown
                            : chunk(i, thread) * 4;
      if (!kRepeat) source = from + (d * ld + c);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        values[4 * i + j] = c < columns && d + j < depth ? __ldg(source) : 0.0f;
        source += kRepeat && j == 3 ? (kDown - 3) * ld : ld;
      }
    }
  }

  __device__ void store(float* big, float* small, int thread) const {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      uint4 b, s;
      split(values[4 * i], b.x, s.x);
      split(values[4 * i + 1], b.y, s.y);
      split(values[4 * i + 2], b.z, s.z);
      split(values[4 * i + 3], b.w, s.w);
      const int to = swizzle_of(column(i, thread), chunk(i, thread));
      *reinterpret_cast<uint4*>(big + to) = b;
      *reinterpret_cast<uint4*>(small + to) = s;
    }
  }
};

}  // namespace reprise::detail::kernels
