#include "split_product.h"
#include "split_tiles.cuh"
#include "tensor_product.cuh"
#include "values.cuh"

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <limits>

namespace reprise::kernels {
namespace {

constexpr int kThreads = kMultipliers + kCarriers;
constexpr int kStages = 4;  // of shared memory between them

struct Arguments {
  const float* a;
  const float* b;
  float* c;
  const float* bias;
  bool add;
  int m, n, k;
  uint32_t lda, ldb, ldc;
  int steps;  // of kDepth, for each block of a cluster
};

/// Shared memory, in values: for each stage b's two parts, then for each a.
template <int kColumns, bool kAAlong>
struct Layout {
  static constexpr int kPart = kColumns * kDepth;
  static constexpr int kB = 2 * kPart;
  static constexpr int kA = TileA<kAAlong>::kSize;
  static constexpr int kLine = kColumns + 4;  // of sums for the rest of a cluster
  static constexpr int kBytes =
      4 * std::max(kStages * (kA + kB), kRows * kLine) + 1024;  // to align
};

/// Brings operands, stage by stage.
template <int kColumns, bool kAAlong, bool kBAlong>
__device__ void carry(const Arguments& p, float* memory, Barrier* full,
                      Barrier* empty, int row0, int column0, int depth0,
                      int steps) {
  using Memory = Layout<kColumns, kAAlong>;
  const int thread = threadIdx.x - kMultipliers;
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
  // Two at a time: what one brings arrives while the other is split.
  TileB<kColumns, kBAlong> even, odd;
  if (steps > 0) begin(0, even);
  for (int step = 0; step < steps; step += 2) {
    if (step + 1 < steps) begin(step + 1, odd);
    end(step, even);
    if (step + 2 < steps) begin(step + 2, even);
    if (step + 1 < steps) end(step + 1, odd);
  }
}

/// Where a thread's values of its warpgroup's product lie: two neighbours in each of
/// two rows, every eight columns.
struct Place {
  int row, column;
};
__device__ __forceinline__ Place place_of(int thread) {
  return {thread / 32 * 16 + thread % 32 / 4, thread % 4 * 2};
}

/// sum = the product of what is brought.
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
    using Product = TensorProduct<kColumns>;
    begin_products(part);
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
    end_products();
    if (step + 1 < steps) take(step + 1);
    finish_products(part);
    __syncwarp();
    if (lane == 0) empty[stage].arrive();
    // Tensor cores cut sums off; over all of the depth that would add up. These round.
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

/// The blocks of a cluster have a part of the depth each, and add up a part of the rows
/// each, in one order.
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
      full[i].init(kCarriers);
      empty[i].init(kMultipliers / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  }
  __syncthreads();

  // Registers go to those who need them: 168 each at the start.
  if (threadIdx.x >= kMultipliers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 120;\n");
    carry<kColumns, kAAlong, kBAlong>(p, memory, full, empty, row0, column0,
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
  asm volatile("bar.sync 1, %0;\n" ::"n"(kMultipliers) : "memory");
#pragma unroll
  for (int i = 0; i < kColumns / 4; ++i) {
    *reinterpret_cast<float2*>(memory +
                               (place.row + i % 2 * 8) * Memory::kLine +
                               place.column + i / 2 * 8) =
        make_float2(sum[2 * i], sum[2 * i + 1]);
  }
  cluster.sync();
  const int rows = kRows / parts;
  for (int i = threadIdx.x; i < rows * kColumns / 2; i += kMultipliers) {
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
  cluster.sync();  // nobody leaves while others read from it
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
void launch_as(const SplitProduct& product, const Arguments& arguments,
               int parts, cudaStream_t stream) {
  if (product.a_along && product.b_along) {
    launch<kColumns, true, true>(arguments, parts, stream);
  } else if (product.a_along) {
    launch<kColumns, true, false>(arguments, parts, stream);
  } else if (product.b_along) {
    launch<kColumns, false, true>(arguments, parts, stream);
  } else {
    launch<kColumns, false, false>(arguments, parts, stream);
  }
}

/// How a product is cut.
struct Cut {
  int columns = 128, parts = 1;
};

/// By microseconds that were measured on an H200: of a step, of a block's start and end,
/// of adding up in a cluster.
Cut best_cut(const SplitProduct& p, int multiprocessors) {
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
  Cut best;
  double least = std::numeric_limits<double>::infinity();
  for (const Kind& kind : kKinds) {
    for (const int parts : {1, 2}) {
      const int64_t blocks =
          pieces(p.m, kRows) * pieces(p.n, kind.columns) * parts;
      const auto steps =
          static_cast<double>(pieces(pieces(p.k, kDepth), parts));
      const double step = p.b_along ? kind.along : kind.across;
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

bool whole_chunks(const float* pointer, int64_t line) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && line % 4 == 0;
}

}  // namespace

bool SplitProduct::fits() const {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  return k % 4 == 0 && m % 4 == 0 && n % 4 == 0 && whole_chunks(a, lda) &&
         whole_chunks(b, ldb) && whole_chunks(c, ldc) &&
         (a_along ? m : k) * lda <= kMost && (b_along ? n : k) * ldb <= kMost;
}

bool split_product_runs(int device) {
  return attribute_of(cudaDevAttrComputeCapabilityMajor, device) == 9 &&
         attribute_of(cudaDevAttrComputeCapabilityMinor, device) == 0;
}

void split_product(const SplitProduct& product, int device, void* stream) {
  const Cut cut = best_cut(
      product, attribute_of(cudaDevAttrMultiProcessorCount, device));
  const auto k = static_cast<int>(product.k);
  const int steps = (k + kDepth - 1) / kDepth;
  const Arguments arguments{product.a,
                            product.b,
                            product.c,
                            product.bias,
                            product.add,
                            static_cast<int>(product.m),
                            static_cast<int>(product.n),
                            k,
                            static_cast<uint32_t>(product.lda),
                            static_cast<uint32_t>(product.ldb),
                            static_cast<uint32_t>(product.ldc),
                            (steps + cut.parts - 1) / cut.parts};
  const auto on = static_cast<cudaStream_t>(stream);
  switch (cut.columns) {
    case 64:
      launch_as<64>(product, arguments, cut.parts, on);
      break;
    case 96:
      launch_as<96>(product, arguments, cut.parts, on);
      break;
    default:
      launch_as<128>(product, arguments, cut.parts, on);
  }
  check_launch("split_product");
}

}  // namespace reprise::kernels
