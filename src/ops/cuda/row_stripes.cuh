#pragma once

#include "load_store.cuh"

#include <cooperative_groups.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

/// Passes over a matrix that also add up its rows, as for the gradient of a bias. The columns
/// are divided into stripes and the rows into parts; one block processes one part of one
/// stripe and holds its sums in registers. If the device has clusters, the parts of a
/// stripe are one cluster, which adds up their sums through shared memory: one launch. If not,
/// the sums of the parts pass through scratch memory. No atomics: results are reproducible
/// bit for bit. Tested by tests/ops/feed_forward_test.cpp.
namespace reprise::detail::kernels {

constexpr int kStripeThreads = 512;
constexpr int kStripeWarps = kStripeThreads / 32;

/// Grid of a pass.
struct Stripes {
  int lanes = 32;   ///< threads per row: 4, 8, 16 or 32
  int each = 8;     ///< columns per thread
  int cluster = 8;  ///< parts of the rows, with clusters

  int count(int64_t columns) const {
    return static_cast<int>((columns + lanes * each - 1) / (lanes * each));
  }
};

/// Wide stripes access memory in long runs, many stripes use all of the device. All blocks
/// should be resident at once: two waves take twice the time. Clusters do not fill a device;
/// 100 blocks per block of a multiprocessor are resident on an H200, which has 132.
template <class Pass>
Stripes choose_stripes(int64_t columns) {
  constexpr int kMaxStripes = 40;
  constexpr int kMaxBlocks = 100 * Pass::kBlocksPerProcessor;
  Stripes made;
  made.lanes = Pass::kMinLanes;
  made.each = Pass::kColumns;
  while (made.lanes < 32 && made.count(columns) > kMaxStripes) made.lanes *= 2;
  made.cluster = std::clamp(kMaxBlocks / made.count(columns), 1, 8);
  return made;
}

/// Result of a pass. `scratch`: parts × columns floats, for devices without clusters.
struct StripeSums {
  int64_t rows, columns;
  int parts;  ///< without clusters
  float* scratch;
  float* sums;  ///< null: not computed
  bool add;     ///< to the sums instead of overwriting them
};

/// Adds up the values of the threads of a block for the same columns: totals[i] belongs to
/// column kColumns · (threadIdx.x % kLanes) + i of the stripe. The result is in `sums`.
template <int kLanes, int kColumns>
__device__ void sum_of_block(float (&totals)[kColumns],
                             float (&shared)[kStripeWarps][kLanes * kColumns],
                             float (&sums)[kLanes * kColumns]) {
  constexpr int kWidth = kLanes * kColumns;
#pragma unroll
  for (int offset = 16; offset >= kLanes; offset /= 2) {
#pragma unroll
    for (float& total : totals) {
      total += __shfl_xor_sync(0xffffffff, total, offset);
    }
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane < kLanes) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      shared[warp][lane * kColumns + i] = totals[i];
    }
  }
  __syncthreads();
  if (threadIdx.x < kWidth) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kStripeWarps; ++i) sum += shared[i][threadIdx.x];
    sums[threadIdx.x] = sum;
  }
}

/// `Pass` processes kColumns columns of one row: load() reads what it needs, use() adds to the
/// totals and may write. kUnroll rows are loaded before the first is used. kMinLanes: the
/// fewest threads per row, 4, 8, 16 or 32.
template <class Pass, int kLanes, bool kCluster>
__global__ void __launch_bounds__(kStripeThreads, Pass::kBlocksPerProcessor)
    stripes_kernel(Pass pass, StripeSums out) {
  namespace cg = cooperative_groups;
  constexpr int kColumns = Pass::kColumns, kUnroll = Pass::kUnroll;
  constexpr int kWidth = kLanes * kColumns, kStep = kStripeThreads / kLanes;
  __shared__ float shared[kStripeWarps][kWidth];
  __shared__ float sums[kWidth];
  const int parts = gridDim.x, part = blockIdx.x;
  const int64_t first_column = static_cast<int64_t>(blockIdx.y) * kWidth;
  const int64_t column = first_column + threadIdx.x % kLanes * kColumns;
  const int64_t each = (out.rows + parts - 1) / parts;
  const int64_t begin = part * each;
  const int64_t end = begin + each < out.rows ? begin + each : out.rows;
  float totals[kColumns] = {};
  if (column < out.columns) {
    int64_t row = begin + threadIdx.x / kLanes;
    const int64_t stride = kStep * out.columns;
    int64_t at = row * out.columns + column;
    for (; row + (kUnroll - 1) * kStep < end; row += kUnroll * kStep) {
      typename Pass::Loaded loaded[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) loaded[i] = pass.load(at + i * stride);
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        pass.use(at + i * stride, loaded[i], totals);
      }
      at += kUnroll * stride;
    }
    for (; row < end; row += kStep, at += stride) {
      pass.use(at, pass.load(at), totals);
    }
  }
  if (out.sums == nullptr) return;
  sum_of_block<kLanes, kColumns>(totals, shared, sums);
  const int64_t mine = first_column + threadIdx.x;
  const bool writes = threadIdx.x < kWidth && mine < out.columns;
  if constexpr (kCluster) {
#if __CUDA_ARCH__ >= 900
    const cg::cluster_group cluster = cg::this_cluster();
    cluster.sync();
    if (part == 0 && writes) {
      float total = out.add ? out.sums[mine] : 0;
      for (int i = 0; i < parts; ++i) {
        total += *cluster.map_shared_rank(sums + threadIdx.x, i);
      }
      out.sums[mine] = total;
    }
    cluster.sync();  // the other blocks' shared memory must exist until here
#endif
  } else if (writes) {
    out.scratch[part * out.columns + mine] = sums[threadIdx.x];
  }
}

/// One block of 32 × kMergeWays threads per 32 columns.
constexpr int kMergeWays = 8;
static __global__ void merge_stripes_kernel(StripeSums out) {
  const int64_t column = int64_t{blockIdx.x} * 32 + threadIdx.x;
  const float total =
      sum_of_parts<kMergeWays>(out.parts, out.columns, out.scratch + column,
                               column < out.columns);
  if (threadIdx.y != 0 || column >= out.columns) return;
  out.sums[column] = out.add ? out.sums[column] + total : total;
}

/// Whether the current device has clusters.
inline bool device_has_clusters() {
  int device = 0, major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  return major >= 9;
}

/// Whether `kernel` was compiled for a device with clusters. The driver may have compiled it
/// for this device from code for an older one.
inline bool compiled_for_clusters(const void* kernel) {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess &&
         attributes.ptxVersion >= 90;
}

template <int kLanes, class Pass>
void run_stripes_of(const Pass& pass, const StripeSums& out,
                    const Stripes& stripes, cudaStream_t stream) {
  const auto count = static_cast<unsigned>(stripes.count(out.columns));
  const auto in_cluster = stripes_kernel<Pass, kLanes, true>;
  static const bool compiled =
      compiled_for_clusters(reinterpret_cast<const void*>(in_cluster));
  if (!compiled || !device_has_clusters()) {
    stripes_kernel<Pass, kLanes, false>
        <<<dim3(out.parts, count), kStripeThreads, 0, stream>>>(pass, out);
    if (out.sums == nullptr) return;
    merge_stripes_kernel<<<static_cast<unsigned>((out.columns + 31) / 32),
                           dim3(32, kMergeWays), 0, stream>>>(out);
    return;
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(stripes.cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(stripes.cluster), count);
  config.blockDim = kStripeThreads;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, in_cluster, pass, out);
}

/// Runs `pass` over the matrix.
template <class Pass>
void run_stripes(const Pass& pass, const StripeSums& out,
                 cudaStream_t stream) {
  const Stripes stripes = choose_stripes<Pass>(out.columns);
  if constexpr (Pass::kMinLanes <= 4) {
    if (stripes.lanes == 4) return run_stripes_of<4>(pass, out, stripes, stream);
  }
  if constexpr (Pass::kMinLanes <= 8) {
    if (stripes.lanes == 8) return run_stripes_of<8>(pass, out, stripes, stream);
  }
  if constexpr (Pass::kMinLanes <= 16) {
    if (stripes.lanes == 16) {
      return run_stripes_of<16>(pass, out, stripes, stream);
    }
  }
  run_stripes_of<32>(pass, out, stripes, stream);
}

}  // namespace reprise::detail::kernels
