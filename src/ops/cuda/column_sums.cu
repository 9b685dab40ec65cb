#include "column_sums.h"
#include "load_store.cuh"

#include <algorithm>
#include <type_traits>

namespace reprise::detail::kernels {
namespace {

constexpr int kWarps = 8;                // per block; each reads one row at a time
constexpr int kColumnsOfBlock = 32 * 8;  // eight per thread

/// One block per `each` rows and 256 columns.
template <class T>
__global__ void parts_kernel(int rows, int columns, int each, const T* matrix,
                             float* scratch) {
  __shared__ float shared[kWarps][kColumnsOfBlock];
  const int lane = threadIdx.x, warp = threadIdx.y;
  const int column = blockIdx.x * kColumnsOfBlock + 8 * lane;
  const int begin = blockIdx.y * each;
  const int end = begin + each < rows ? begin + each : rows;
  float total[8] = {};
  if (column < columns) {
#pragma unroll 4
    for (int r = begin + warp; r < end; r += kWarps) {
      const auto eight = *reinterpret_cast<const Eight<T>*>(
          matrix + static_cast<int64_t>(r) * columns + column);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 two = eight.pair(j);
        total[2 * j] += two.x;
        total[2 * j + 1] += two.y;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) shared[warp][8 * lane + j] = total[j];
  __syncthreads();
  const int mine = warp * 32 + lane;  // one column per thread
  if (blockIdx.x * kColumnsOfBlock + mine >= columns) return;
  float sum = 0;
  for (int i = 0; i < kWarps; ++i) sum += shared[i][mine];
  scratch[static_cast<int64_t>(blockIdx.y) * columns +
          blockIdx.x * kColumnsOfBlock + mine] = sum;
}

/// One block per 32 columns.
__global__ void merge_kernel(int parts, int columns, const float* scratch,
                             float* sums, bool add) {
  const int column = blockIdx.x * 32 + threadIdx.x;
  const float total = sum_of_parts<kWarps>(parts, columns, scratch + column,
                                           column < columns);
  if (threadIdx.y != 0 || column >= columns) return;
  sums[column] = add ? sums[column] + total : total;
}

}  // namespace

void column_sums(const ColumnSums& args, void* stream) {
  const ColumnSumsShape& shape = args.shape;
  if (shape.columns == 0) return;
  const auto on = static_cast<cudaStream_t>(stream);
  const auto rows = static_cast<int>(shape.rows);
  const auto columns = static_cast<int>(shape.columns);
  const auto parts = static_cast<int>(shape.parts());
  const dim3 threads(32, kWarps);
  const dim3 blocks((columns + kColumnsOfBlock - 1) / kColumnsOfBlock, parts);
  with_half(shape.type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    parts_kernel<T><<<blocks, threads, 0, on>>>(
        rows, columns, (rows + parts - 1) / parts,
        static_cast<const T*>(args.matrix), args.scratch);
  });
  merge_kernel<<<(columns + 31) / 32, threads, 0, on>>>(
      parts, columns, args.scratch, args.sums, args.add);
  check_launch("column_sums");
}

}  // namespace reprise::detail::kernels
