#include "column_sums.h"
#include "row_stripes.cuh"

#include <type_traits>

namespace reprise::detail::kernels {
namespace {

/// Eight columns per thread.
template <class T>
struct SumEight {
  static constexpr int kColumns = 8, kMinLanes = 4;
  static constexpr int kUnroll = 4, kBlocksPerProcessor = 3;
  using Loaded = Eight<T>;
  const T* matrix;

  __device__ Loaded load(int64_t at) const {
    return *reinterpret_cast<const Eight<T>*>(matrix + at);
  }
  __device__ void use(int64_t, const Loaded& eight, float (&totals)[8]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = eight.pair(i);
      totals[2 * i] += two.x;
      totals[2 * i + 1] += two.y;
    }
  }
};

/// One column per thread, for every width and alignment.
template <class T>
struct SumOne {
  static constexpr int kColumns = 1, kMinLanes = 32;
  static constexpr int kUnroll = 8, kBlocksPerProcessor = 3;
  using Loaded = float;
  const T* matrix;

  __device__ Loaded load(int64_t at) const { return load1(matrix, at); }
  __device__ void use(int64_t, float value, float (&totals)[1]) const {
    totals[0] += value;
  }
};

}  // namespace

void column_sums(const ColumnSums& args, void* stream) {
  const ColumnSumsShape& shape = args.shape;
  if (shape.columns == 0) return;
  const auto on = static_cast<cudaStream_t>(stream);
  const StripeSums out{shape.rows,
                       shape.columns,
                       static_cast<int>(shape.parts()),
                       args.scratch,
                       args.sums,
                       args.add};
  const bool vector = shape.columns % 8 == 0 &&
                      reinterpret_cast<uintptr_t>(args.matrix) % 16 == 0;
  with_half(shape.type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto* matrix = static_cast<const T*>(args.matrix);
    if (vector) {
      run_stripes(SumEight<T>{matrix}, out, on);
    } else {
      run_stripes(SumOne<T>{matrix}, out, on);
    }
  });
  check_launch("column_sums");
}

}  // namespace reprise::detail::kernels
