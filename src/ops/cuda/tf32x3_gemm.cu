#include "tf32x3_gemm.h"
#include "tf32x3_tiles.cuh"
#include "wgmma_tf32.cuh"
#include "load_store.cuh"

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <limits>

namespace reprise::detail::kernels {
namespace {

constexpr int kThreads = kConsumers + kProducers;
constexpr int kStages = 4;  // of shared memory, between producers and consumers

struct Arguments {
  const float* a;
  const float* b;
  float* c;
  const float* bias;
  bool add;
  int m, n, k;
  uint32_t lda, ldb, ldc;
  int steps;  // of kDepth, per block of a cluster
};

/// Shared memory, in floats: the two halves of b for every stage, then a for every stage.
template <int kColumns, bool kAAlong>
struct Layout {
  static constexpr int kPart = kColumns * kDepth;
  static constexpr int kB = 2 * kPart;
  static constexpr int kA = TileA<kAAlong>::kSize;
  static constexpr int kLine = kColumns + 4;  // of sums, read by the other blocks of a cluster
  static constexpr int kBytes =
      4 * std::max(kStages * (kA + kB), kRows * kLine) + 1024;  // for alignment
};

/// The producers: load the operands into shared memory, stage by stage.
template <int kColumns, bool kAAlong, bool kBAlong>
__device__ void produce(const Arguments& p, float* memory, Barrier* full,
                      Barrier* empty, int row0, int column0, int depth0,
                      int steps) {
  using Memory = Layout<kColumns, kAAlong>;
  const int thread = threadIdx.x - kConsumers;
  const int64_t lda = p.lda, ldb = p.ldb;
  const float* a = p.a + (kAAlong ? row0 * lda + depth0 : depth0 * lda + row0);
  const float* b =
      p.b + (kBAlong ? column0 * ldb + depth0 : depth0 * ldb + column0);
  int depth = p.k - depth0;
  const auto begin = [&](int step, auto& tile) {
    const int stage = step % kStages;
    tile.load(b, p.ldb, p.n - column0, depth, thread);
    if (step >= kStages) empty[stage].wait(step / kStages - 1);
    TileA<kAAlong>::load(memory + kStages * Memory::kB + stage * Memory::kA, a,
                         p.lda, p.m - row0, depth, thread);
    end_copies();
    a += kAAlong ? kDepth : kDepth * lda;
    b += kBAlong ? kDepth : kDepth * ldb;
    depth -= kDepth;
  };
  const auto end = [&](int step, const auto& tile) {
    const int stage = step % kStages;
    float* parts = memory + stage * Memory::kB;
    tile.store(parts, parts + Memory::kPart, thread);
    if (step + 1 < steps) {
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
    full[stage].arrive();
  };
  // Two tiles: one is loaded while the other is split.
  TileB<kColumns, kBAlong> even, odd;
  if (steps > 0) begin(0, even);
  for (int step = 0; step < steps; step += 2) {
    if (step + 1 < steps) begin(step + 1, odd);
    end(step, even);
    if (step + 2 < steps) begin(step + 2, even);
    if (step + 1 < steps) end(step + 1, odd);
  }
}

/// First row and column of the elements that a thread holds of its warpgroup's product: two
/// adjacent ones in each of two rows, every eight columns.
struct Place {
  int row, column;
};
__device__ __forceinline__ Place place_of(int thread) {
  return {thread / 32 * 16 + thread % 32 / 4, thread % 4 * 2};
}

/// The consumers: sum = product of the operands in shared memory.
template <int kColumns, bool kAAlong>
__device__ __forceinline__ void multiply(float (&sum)[kColumns / 2],
                                         const float* memory, Barrier* full,
                                         Barrier* empty, int steps) {
  using Memory = Layout<kColumns, kAAlong>;
  constexpr int kSlices = kDepth / 8;
  const int lane = threadIdx.x % 32;
  const int row = place_of(threadIdx.x).row, inner = lane % 4;
  float a[4 * kSlices];
  const auto take = [&](int step) {
    const int stage = step % kStages;
    full[stage].wait(step / kStages);
    const float* tile = memory + kStages * Memory::kB + stage * Memory::kA;
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[4 * s + i] = TileA<kAAlong>::value(tile, row + i % 2 * 8,
                                             8 * s + inner + i / 2 * 4);
      }
    }
  };
  float part[kColumns / 2] = {};
  if (steps > 0) take(0);
  for (int step = 0; step < steps; ++step) {
    uint32_t big[4 * kSlices], small[4 * kSlices];
#pragma unroll
    for (int i = 0; i < 4 * kSlices; ++i) split(a[i], big[i], small[i]);
    const int stage = step % kStages;
    const uint64_t b_big = descriptor_of(memory + stage * Memory::kB);
    const uint64_t b_small = b_big + (Memory::kPart * 4 >> 4);
    using Product = WgmmaTf32<kColumns>;
    begin_wgmma(part);
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      Product::run(part, small + 4 * s, b_big + 2 * s, s > 0);
    }
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      Product::run(part, big + 4 * s, b_small + 2 * s, 1);
    }
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      Product::run(part, big + 4 * s, b_big + 2 * s, 1);
    }
    commit_wgmma();
    if (step + 1 < steps) take(step + 1);
    wait_wgmma(part);
    __syncwarp();
    if (lane == 0) empty[stage].arrive();
    // Tensor cores truncate sums, and over the whole depth the error would add up. These
    // additions round.
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) sum[i] += part[i];
  }
}

__device__ __forceinline__ void write(const Arguments& p, int row, int column,
                                      float2 value) {
  if (row >= p.m || column >= p.n) return;
  if (p.bias != nullptr) {
    value.x += p.bias[column];
    value.y += p.bias[column + 1];
  }
  auto* to =
      reinterpret_cast<float2*>(p.c + static_cast<int64_t>(row) * p.ldc + column);
  if (p.add) {
    const float2 before = *to;
    value.x += before.x;
    value.y += before.y;
  }
  *to = value;
}

/// Each block of a cluster multiplies a part of the depth, and then adds up all parts for
/// some of the rows, in a fixed order.
template <int kColumns, bool kAAlong, bool kBAlong>
__global__ __launch_bounds__(kThreads, 1) void product_kernel(Arguments p) {
  using Memory = Layout<kColumns, kAAlong>;
  extern __shared__ float unaligned[];
  __shared__ Barrier full[kStages], empty[kStages];
  auto* memory = reinterpret_cast<float*>(
      (reinterpret_cast<uintptr_t>(unaligned) + 1023) / 1024 * 1024);
  const auto cluster = cooperative_groups::this_cluster();
  const auto parts = static_cast<int>(cluster.num_blocks());
  const auto mine = static_cast<int>(cluster.block_rank());
  const int tile = blockIdx.x / parts;
  const int down = (p.m + kRows - 1) / kRows;
  const int row0 = tile % down * kRows, column0 = tile / down * kColumns;
  const int depth0 = mine * p.steps * kDepth;
  const int steps =
      max(0, min(p.steps, (p.k - depth0 + kDepth - 1) / kDepth));
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(kProducers);
      empty[i].init(kConsumers / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  }
  __syncthreads();

  // Moves registers from producers to consumers; each thread starts with 168.
  if (threadIdx.x >= kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 120;\n");
    produce<kColumns, kAAlong, kBAlong>(p, memory, full, empty, row0, column0,
                                      depth0, steps);
    if (parts > 1) {
      cluster.sync();
      cluster.sync();
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 192;\n");
  float sum[kColumns / 2] = {};
  multiply<kColumns, kAAlong>(sum, memory, full, empty, steps);
  const Place place = place_of(threadIdx.x);
  if (parts == 1) {
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      write(p, row0 + place.row + i % 2 * 8, column0 + place.column + i / 2 * 8,
            make_float2(sum[2 * i], sum[2 * i + 1]));
    }
    return;
  }
  asm volatile("bar.sync 1, %0;\n" ::"n"(kConsumers) : "memory");
#pragma unroll
  for (int i = 0; i < kColumns / 4; ++i) {
    *reinterpret_cast<float2*>(memory +
                               (place.row + i % 2 * 8) * Memory::kLine +
                               place.column + i / 2 * 8) =
        make_float2(sum[2 * i], sum[2 * i + 1]);
  }
  cluster.sync();
  const int rows = kRows / parts;
  for (int i = threadIdx.x; i < rows * kColumns / 2; i += kConsumers) {
    const int row = mine * rows + i / (kColumns / 2);
    const int column = i % (kColumns / 2) * 2;
    float2 value = make_float2(0, 0);
    for (int other = 0; other < parts; ++other) {
      const auto theirs = *reinterpret_cast<const float2*>(
          cluster.map_shared_rank(memory, other) + row * Memory::kLine + column);
      value.x += theirs.x;
      value.y += theirs.y;
    }
    write(p, row0 + row, column0 + column, value);
  }
  cluster.sync();  // no block exits while others read its shared memory
}

template <int kColumns, bool kAAlong, bool kBAlong>
void launch(const Arguments& arguments, int parts, cudaStream_t stream) {
  auto* kernel = product_kernel<kColumns, kAAlong, kBAlong>;
  constexpr int kBytes = Layout<kColumns, kAAlong>::kBytes;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       kBytes);
  const int tiles = (arguments.m + kRows - 1) / kRows *
                    ((arguments.n + kColumns - 1) / kColumns);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = parts;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(tiles * parts);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, kernel, arguments);
}

template <int kColumns>
void launch_as(const Tf32x3Gemm& gemm, const Arguments& arguments, int parts,
               cudaStream_t stream) {
  if (gemm.a_k_contiguous && gemm.b_k_contiguous) {
    launch<kColumns, true, true>(arguments, parts, stream);
  } else if (gemm.a_k_contiguous) {
    launch<kColumns, true, false>(arguments, parts, stream);
  } else if (gemm.b_k_contiguous) {
    launch<kColumns, false, true>(arguments, parts, stream);
  } else {
    launch<kColumns, false, false>(arguments, parts, stream);
  }
}

/// Columns per block, and blocks per cluster along the depth.
struct Tiling {
  int columns = 128, parts = 1;
};

/// The tiling with the shortest estimated time. The constants are microseconds measured on
/// an H200: per step, per start and end of a block, per reduction in a cluster.
Tiling best_tiling(const Tf32x3Gemm& p, int multiprocessors) {
  struct Kind {
    int columns;
    double along, across;
  };
  constexpr Kind kKinds[] = {
      {64, 0.77, 0.77}, {96, 0.87, 1.05}, {128, 1.08, 1.35}};
  constexpr double kEnds = 3.5, kCluster = 3;
  const auto pieces = [](int64_t whole, int64_t each) {
    return (whole + each - 1) / each;
  };
  Tiling best;
  double least = std::numeric_limits<double>::infinity();
  for (const Kind& kind : kKinds) {
    for (const int parts : {1, 2}) {
      const int64_t blocks =
          pieces(p.m, kRows) * pieces(p.n, kind.columns) * parts;
      const auto steps =
          static_cast<double>(pieces(pieces(p.k, kDepth), parts));
      const double step = p.b_k_contiguous ? kind.along : kind.across;
      const double time =
          static_cast<double>(pieces(blocks, multiprocessors)) *
              (step * steps + kEnds) +
          (parts - 1) * kCluster;
      if (time < least) {
        least = time;
        best = {kind.columns, parts};
      }
    }
  }
  return best;
}

int attribute_of(cudaDeviceAttr attribute, int device) {
  int value = 0;
  return cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess
             ? value
             : 0;
}

}  // namespace

void tf32x3_gemm(const Tf32x3Gemm& gemm, void* stream) {
  const Tiling tiling = best_tiling(
      gemm, attribute_of(cudaDevAttrMultiProcessorCount, gemm.device));
  const auto k = static_cast<int>(gemm.k);
  const int steps = (k + kDepth - 1) / kDepth;
  const Arguments arguments{gemm.a,
                            gemm.b,
                            gemm.c,
                            gemm.bias,
                            gemm.add,
                            static_cast<int>(gemm.m),
                            static_cast<int>(gemm.n),
                            k,
                            static_cast<uint32_t>(gemm.lda),
                            static_cast<uint32_t>(gemm.ldb),
                            static_cast<uint32_t>(gemm.ldc),
                            (steps + tiling.parts - 1) / tiling.parts};
  const auto on = static_cast<cudaStream_t>(stream);
  switch (tiling.columns) {
    case 64:
      launch_as<64>(gemm, arguments, tiling.parts, on);
      break;
    case 96:
      launch_as<96>(gemm, arguments, tiling.parts, on);
      break;
    default:
      launch_as<128>(gemm, arguments, tiling.parts, on);
  }
  check_launch("tf32x3_gemm");
}

}  // namespace reprise::detail::kernels
