#include "load_store.cuh"
#include "split_bits.cuh"
#include "split_weights.h"

#include <algorithm>

namespace reprise::detail::kernels {
namespace {

constexpr int kSplitThreads = 256;

/// A block holds a whole row in registers, eight values per thread and unit, before it
/// writes the row back.
template <int kUnits, bool kMerge>
__global__ void __launch_bounds__(kSplitThreads)
    split_weights_kernel(int64_t rows, int columns, float* weights) {
  const int units = columns / 8;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    auto* data = reinterpret_cast<uint4*>(weights + row * columns);
    uint4 a[kUnits], b[kUnits];
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const int unit = threadIdx.x + k * kSplitThreads;
      if (unit >= units) continue;
      a[k] = kMerge ? data[unit] : data[2 * unit];
      b[k] = kMerge ? data[units + unit] : data[2 * unit + 1];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const int unit = threadIdx.x + k * kSplitThreads;
      if (unit >= units) continue;
      uint4 c, d;
      if constexpr (kMerge) {
        merge_two(a[k].x, b[k].x, c.x, c.y);
        merge_two(a[k].y, b[k].y, c.z, c.w);
        merge_two(a[k].z, b[k].z, d.x, d.y);
        merge_two(a[k].w, b[k].w, d.z, d.w);
      } else {
        split_two(a[k].x, a[k].y, c.x, d.x);
        split_two(a[k].z, a[k].w, c.y, d.y);
        split_two(b[k].x, b[k].y, c.z, d.z);
        split_two(b[k].z, b[k].w, c.w, d.w);
      }
      data[kMerge ? 2 * unit : unit] = c;
      data[kMerge ? 2 * unit + 1 : units + unit] = d;
    }
  }
}

template <int kUnits>
void launch(const SplitWeights& args, cudaStream_t stream) {
  constexpr int64_t kMaxBlocks = 132 * 8;
  const auto blocks = static_cast<unsigned>(std::min(args.rows, kMaxBlocks));
  const auto columns = static_cast<int>(args.columns);
  if (args.merge) {
    split_weights_kernel<kUnits, true><<<blocks, kSplitThreads, 0, stream>>>(
        args.rows, columns, args.weights);
  } else {
    split_weights_kernel<kUnits, false><<<blocks, kSplitThreads, 0, stream>>>(
        args.rows, columns, args.weights);
  }
}

}  // namespace

void split_weights(const SplitWeights& args, void* stream) {
  if (args.rows == 0 || args.columns == 0) return;
  auto* on = static_cast<cudaStream_t>(stream);
  const int64_t units = args.columns / 8;
  if (units <= kSplitThreads) {
    launch<1>(args, on);
  } else if (units <= 2 * kSplitThreads) {
    launch<2>(args, on);
  } else if (units <= 4 * kSplitThreads) {
    launch<4>(args, on);
  } else {
    launch<8>(args, on);
  }
  check_launch("split_weights");
}

}  // namespace reprise::detail::kernels
