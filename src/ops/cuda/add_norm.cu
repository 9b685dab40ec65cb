#include "add_norm.h"
#include "load_store.cuh"

#include <cuda_pipeline_primitives.h>

#include <type_traits>

namespace reprise::detail::kernels {
namespace {

constexpr int kMergers = 32;  // threads that add up the parts of a column

/// How a block divides its rows: kRows at a time, each over kWarps warps, whose threads have
/// kFours float4 each.
template <int kWarps_, int kFours_, int kRows_>
struct Tile {
  static constexpr int kWarps = kWarps_, kFours = kFours_, kRows = kRows_;
  static constexpr int kLanes = 32 * kWarps;  // threads per row
  static constexpr int kThreads = kLanes * kRows;
};

__device__ float4 operator+(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ float4 operator*(float4 a, float4 b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}
__device__ float total(float4 v) {
  return (v.x + v.y) + (v.z + v.w);
}
/// (v - mean) · inverse
__device__ float4 scaled(float4 v, float mean, float inverse) {
  return make_float4((v.x - mean) * inverse, (v.y - mean) * inverse,
                     (v.z - mean) * inverse, (v.w - mean) * inverse);
}

__device__ float4 rounded(DType type, float4 v) {
  if (type == DType::kBFloat16) {
    return make_float4(__bfloat162float(__float2bfloat16_rn(v.x)),
                       __bfloat162float(__float2bfloat16_rn(v.y)),
                       __bfloat162float(__float2bfloat16_rn(v.z)),
                       __bfloat162float(__float2bfloat16_rn(v.w)));
  }
  if (type == DType::kFloat16) {
    return make_float4(__half2float(__float2half_rn(v.x)),
                       __half2float(__float2half_rn(v.y)),
                       __half2float(__float2half_rn(v.z)),
                       __half2float(__float2half_rn(v.w)));
  }
  return v;
}

/// Calls `use` with `data` as a pointer to `type`. The type is the same for all threads; a
/// branch per row costs nothing beside its memory accesses, and a kernel per combination of
/// types would take minutes to compile.
template <class F>
__device__ void with_pointer(DType type, const void* data, F&& use) {
  if (type == DType::kFloat32) return use(static_cast<const float*>(data));
  if (type == DType::kBFloat16) {
    return use(static_cast<const __nv_bfloat16*>(data));
  }
  use(static_cast<const __half*>(data));
}

/// Loads this thread's elements of the row at `first`; zeros beyond its end.
template <class T>
__device__ void load_row(float4 (&v)[T::kFours], DType type, const void* data,
                         int64_t first, int fours) {
  with_pointer(type, data, [&](const auto* from) {
#pragma unroll
    for (int k = 0; k < T::kFours; ++k) {
      const int i = threadIdx.x + k * T::kLanes;
      v[k] = i < fours ? load4(from + first, i) : make_float4(0, 0, 0, 0);
    }
  });
}
template <class T>
__device__ void store_row(const float4 (&v)[T::kFours], DType type, void* data,
                          int64_t first, int fours) {
  with_pointer(type, data, [&](const auto* like) {
    auto* to = const_cast<std::remove_const_t<
        std::remove_pointer_t<decltype(like)>>*>(like);
#pragma unroll
    for (int k = 0; k < T::kFours; ++k) {
      const int i = threadIdx.x + k * T::kLanes;
      if (i < fours) store4(to + first, i, v[k]);
    }
  });
}

/// Sums over the threads of a row, returned to all of them. All threads of the block must
/// call this.
template <class T>
__device__ float2 sum_over_row(float a, float b) {
  for (int half = 16; half > 0; half /= 2) {
    a += __shfl_xor_sync(0xffffffffu, a, half);
    b += __shfl_xor_sync(0xffffffffu, b, half);
  }
  if constexpr (T::kWarps == 1) {
    return make_float2(a, b);
  } else {
    __shared__ float2 warps[T::kRows][T::kWarps];
    __syncthreads();  // the results of the previous call have been read
    if (threadIdx.x % 32 == 0) {
      warps[threadIdx.y][threadIdx.x / 32] = make_float2(a, b);
    }
    __syncthreads();
    float2 sum = warps[threadIdx.y][0];
    for (int i = 1; i < T::kWarps; ++i) {
      sum.x += warps[threadIdx.y][i].x;
      sum.y += warps[threadIdx.y][i].y;
    }
    return sum;
  }
}

/// The normalized values as they are multiplied by the weight: the RMS norm rounds them to
/// the type of x before.
template <NormKind kKind>
__device__ float4 weighted(DType x, float4 normalized) {
  return kKind == NormKind::kRms ? rounded(x, normalized) : normalized;
}

template <NormKind kKind, class T>
__global__ void __launch_bounds__(T::kThreads)
    forward_kernel(const AddNormForward args) {
  const AddNormShape& shape = args.shape;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * T::kRows + threadIdx.y;
  // Rows of several warps have a block of their own, so that none leaves before a barrier.
  if (row >= shape.rows) return;
  const int fours = static_cast<int>(shape.columns / 4);
  const float columns = static_cast<float>(shape.columns);
  const int64_t first = row * shape.columns;
  float4 v[T::kFours];
  load_row<T>(v, shape.x, args.x, first, fours);
  if (shape.branch != DType::kNone) {
    float4 added[T::kFours];
    load_row<T>(added, shape.branch, args.branch, first, fours);
#pragma unroll
    for (int k = 0; k < T::kFours; ++k) v[k] = rounded(shape.x, v[k] + added[k]);
    store_row<T>(v, shape.x, args.sum, first, fours);
  }
  float mean = 0;
  if constexpr (kKind == NormKind::kLayer) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < T::kFours; ++k) sum += total(v[k]);
    mean = sum_over_row<T>(sum, 0).x / columns;
  }
  float squares = 0;
#pragma unroll
  for (int k = 0; k < T::kFours; ++k) {
    if (threadIdx.x + k * T::kLanes >= fours) continue;
    const float4 d = scaled(v[k], mean, 1);
    squares += total(d * d);
  }
  const float inverse =
      rsqrtf(sum_over_row<T>(squares, 0).x / columns +
             static_cast<float>(args.epsilon));
  float4 w[T::kFours];
  load_row<T>(w, shape.weight, args.weight, 0, fours);
#pragma unroll
  for (int k = 0; k < T::kFours; ++k) {
    v[k] = weighted<kKind>(shape.x, scaled(v[k], mean, inverse)) * w[k];
  }
  if constexpr (kKind == NormKind::kLayer) {
    load_row<T>(w, shape.weight, args.bias, 0, fours);
#pragma unroll
    for (int k = 0; k < T::kFours; ++k) v[k] = v[k] + w[k];
  }
  store_row<T>(v, shape.normalized, args.normalized, first, fours);
  if (args.stream != nullptr) {
    store_row<T>(v, shape.x, args.stream, first, fours);
  }
  if (threadIdx.x == 0) {
    if (kKind == NormKind::kLayer) args.mean[row] = mean;
    args.inverse[row] = inverse;
  }
}

/// Adds up `v` of the rows that the block processes at a time, for its first row.
template <class T>
__device__ void add_rows(float4 (&v)[T::kFours]) {
  if constexpr (T::kRows > 1) {
    __shared__ float4 other[T::kFours][T::kLanes];
    for (int row = 1; row < T::kRows; ++row) {
      __syncthreads();
#pragma unroll
      for (int k = 0; k < T::kFours; ++k) {
        if (threadIdx.y == row) other[k][threadIdx.x] = v[k];
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < T::kFours; ++k) {
        if (threadIdx.y == 0) v[k] = v[k] + other[k][threadIdx.x];
      }
    }
  }
}

/// Bytes of four elements.
__host__ __device__ constexpr int four_bytes(DType type) {
  return type == DType::kFloat32 ? 16 : 8;
}

/// Rows of the backward that have been requested and not processed yet, in shared memory.
/// Every thread reads only what it has copied itself.
template <class T>
struct StagedRows {
  const AddNormBackward& args;
  char* memory;

  static constexpr int kSlots = T::kFours * T::kThreads;

  static __host__ __device__ int bytes(const AddNormShape& shape) {
    return kSlots * (2 * four_bytes(shape.x) + four_bytes(shape.normalized));
  }
  static __device__ int slot(int k) {
    return k * T::kThreads + threadIdx.y * T::kLanes + threadIdx.x;
  }

  /// Starts to copy this thread's part of a row to `stage`.
  __device__ void request(int stage, int64_t first, int fours) const {
    char* to = memory + stage * bytes(args.shape);
    copy(to, args.shape.x, args.sum, first, fours);
    to += kSlots * four_bytes(args.shape.x);
    copy(to, args.shape.normalized, args.dnormalized, first, fours);
    to += kSlots * four_bytes(args.shape.normalized);
    if (args.dsum != nullptr) copy(to, args.shape.x, args.dsum, first, fours);
  }
  /// Reads values, gradients of the result and gradients from other uses.
  __device__ void read(int stage, int fours, float4 (&sum)[T::kFours],
                       float4 (&dnormalized)[T::kFours],
                       float4 (&dsum)[T::kFours]) const {
    const char* from = memory + stage * bytes(args.shape);
    load(sum, args.shape.x, from, fours);
    from += kSlots * four_bytes(args.shape.x);
    load(dnormalized, args.shape.normalized, from, fours);
    from += kSlots * four_bytes(args.shape.normalized);
    load(dsum, args.shape.x, from, args.dsum == nullptr ? 0 : fours);
  }

 private:
  __device__ void copy(char* to, DType type, const void* data, int64_t first,
                       int fours) const {
    const int size = four_bytes(type);
    const char* from = static_cast<const char*>(data) + first / 4 * size;
#pragma unroll
    for (int k = 0; k < T::kFours; ++k) {
      const int i = threadIdx.x + k * T::kLanes;
      if (i >= fours) continue;
      if (size == 16) {
        __pipeline_memcpy_async(to + slot(k) * 16, from + i * 16, 16);
      } else {
        __pipeline_memcpy_async(to + slot(k) * 8, from + i * 8, 8);
      }
    }
  }
  __device__ void load(float4 (&v)[T::kFours], DType type, const void* data,
                       int fours) const {
    with_pointer(type, data, [&](const auto* from) {
#pragma unroll
      for (int k = 0; k < T::kFours; ++k) {
        v[k] = threadIdx.x + k * T::kLanes < fours ? load4(from, slot(k))
                                                   : make_float4(0, 0, 0, 0);
      }
    });
  }
};

/// Gradient of the input of a norm: inverse · (g - lost - n · tilt). The product is rounded
/// before another gradient is added to it, as if autograd added both.
__device__ float4 of_input(float4 g, float4 n, float lost, float tilt,
                           float inverse) {
  return make_float4(__fmul_rn(inverse, g.x - lost - n.x * tilt),
                     __fmul_rn(inverse, g.y - lost - n.y * tilt),
                     __fmul_rn(inverse, g.z - lost - n.z * tilt),
                     __fmul_rn(inverse, g.w - lost - n.w * tilt));
}

/// Blocks of the backward per multiprocessor, as many as its registers suffice for.
template <class T>
constexpr int backward_blocks() {
  return T::kThreads > 256 ? 1 : T::kFours > 2 ? 2 : 768 / T::kThreads;
}

/// One block per part of consecutive rows. A thread handles the same columns of all of its
/// rows, and so adds up its share of the gradients of weight and bias in registers. `stages`
/// rows are in flight, 1 or 2.
template <NormKind kKind, class T>
__global__ void __launch_bounds__(T::kThreads, backward_blocks<T>())
    backward_kernel(const AddNormBackward args, int stages) {
  constexpr bool kLayer = kKind == NormKind::kLayer;
  extern __shared__ uint4 staged[];
  const AddNormShape& shape = args.shape;
  const StagedRows<T> rows{args, reinterpret_cast<char*>(staged)};
  const int fours = static_cast<int>(shape.columns / 4);
  const float columns = static_cast<float>(shape.columns);
  const int64_t begin = shape.rows * blockIdx.x / gridDim.x;
  const int64_t end = shape.rows * (blockIdx.x + 1) / gridDim.x;
  const auto request = [&](int64_t row, int stage) {
    if (row < end) rows.request(stage, row * shape.columns, fours);
    __pipeline_commit();
  };
  const auto statistic = [&](const float* of, int64_t row) {
    return row < end ? of[row] : 0;
  };
  int64_t row = begin + threadIdx.y;
  for (int i = 0; i < stages; ++i) request(row + i * T::kRows, i);
  float mean = kLayer ? statistic(args.mean, row) : 0;
  float inverse = statistic(args.inverse, row);
  float4 w[T::kFours], dweight[T::kFours], dbias[T::kFours];
  load_row<T>(w, shape.weight, args.weight, 0, fours);
#pragma unroll
  for (int k = 0; k < T::kFours; ++k) {
    dweight[k] = dbias[k] = make_float4(0, 0, 0, 0);
  }
  int stage = 0;
  for (int64_t base = begin; base < end; base += T::kRows, row += T::kRows) {
    const int count = row < end ? fours : 0;  // of this row
    // Values, then normalized values; gradients of the result, then times the weight.
    float4 n[T::kFours], g[T::kFours], dsum[T::kFours];
    if (stages == 2) {
      __pipeline_wait_prior(1);
    } else {
      __pipeline_wait_prior(0);
    }
    rows.read(stage, count, n, g, dsum);
    request(row + stages * T::kRows, stage);
    stage = stages - 1 - stage;
    const float next_mean = kLayer ? statistic(args.mean, row + T::kRows) : 0;
    const float next_inverse = statistic(args.inverse, row + T::kRows);
    float sum = 0, product = 0;
#pragma unroll
    for (int k = 0; k < T::kFours; ++k) {
      if (args.of_stream) {
        g[k] = g[k] + dsum[k];
        dsum[k] = make_float4(0, 0, 0, 0);
      }
      n[k] = scaled(n[k], mean, inverse);
      dweight[k] = dweight[k] + g[k] * weighted<kKind>(shape.x, n[k]);
      if (kLayer) dbias[k] = dbias[k] + g[k];
      g[k] = g[k] * w[k];
      if (kLayer) sum += total(g[k]);
      product += total(g[k] * n[k]);
    }
    const float2 sums = sum_over_row<T>(sum, product);
    const float lost = sums.x / columns, tilt = sums.y / columns;
#pragma unroll
    for (int k = 0; k < T::kFours; ++k) {
      g[k] = of_input(g[k], n[k], lost, tilt, inverse) + dsum[k];
    }
    const int64_t first = row * shape.columns;
    store_row<T>(g, shape.x, args.dx, first, count);
    if (shape.branch != DType::kNone) {
      store_row<T>(g, shape.branch, args.dbranch, first, count);
    }
    mean = next_mean;
    inverse = next_inverse;
  }
  if (args.dweight == nullptr) return;
  add_rows<T>(dweight);
  if (kLayer) add_rows<T>(dbias);
  if (threadIdx.y != 0) return;
  const int64_t mine = static_cast<int64_t>(blockIdx.x) * shape.columns;
  store_row<T>(dweight, DType::kFloat32, args.scratch, mine, fours);
  if (kLayer) {
    store_row<T>(dbias, DType::kFloat32,
                 args.scratch + gridDim.x * shape.columns, mine, fours);
  }
}

/// One block per 32 columns of the gradient of the weight (y = 0) or the bias (y = 1).
__global__ void merge_kernel(int parts, int columns, const float* scratch,
                             DType type, void* dweight, void* dbias) {
  const int column = blockIdx.x * 32 + threadIdx.x;
  const float* from =
      scratch + static_cast<int64_t>(blockIdx.y) * parts * columns + column;
  const float sum =
      sum_of_parts<kMergers>(parts, columns, from, column < columns);
  if (threadIdx.y != 0 || column >= columns) return;
  void* to = blockIdx.y == 0 ? dweight : dbias;
  if (type == DType::kFloat32) {
    static_cast<float*>(to)[column] = sum;
  } else if (type == DType::kBFloat16) {
    static_cast<__nv_bfloat16*>(to)[column] = __float2bfloat16_rn(sum);
  } else {
    static_cast<__half*>(to)[column] = __float2half_rn(sum);
  }
}

/// Calls `use` with the tile for rows of more than 2048 columns.
template <class F>
void with_wide_tile(int64_t columns, F&& use) {
  if (columns <= 3072) return use(Tile<8, 3, 1>());
  if (columns <= 4096) return use(Tile<8, 4, 1>());
  if (columns <= 6144) return use(Tile<16, 3, 1>());
  use(Tile<16, 4, 1>());
}
/// The forward has one warp per row if its registers suffice: no barriers, and loads of four
/// independent rows per block.
template <class F>
void with_forward_tile(int64_t columns, F&& use) {
  if (columns <= 256) return use(Tile<1, 2, 4>());
  if (columns <= 512) return use(Tile<1, 4, 4>());
  if (columns <= 768) return use(Tile<1, 6, 4>());
  if (columns <= 1024) return use(Tile<1, 8, 4>());
  if (columns <= 1536) return use(Tile<4, 3, 1>());
  if (columns <= 2048) return use(Tile<4, 4, 1>());
  with_wide_tile(columns, use);
}
/// The backward needs up to six arrays of a row in registers, so more threads share a row.
/// AddNormShape::blocks_per_multiprocessor() depends on this.
template <class F>
void with_backward_tile(int64_t columns, F&& use) {
  if (columns <= 256) return use(Tile<1, 2, 8>());
  if (columns <= 512) return use(Tile<2, 2, 4>());
  if (columns <= 768) return use(Tile<3, 2, 2>());
  if (columns <= 1024) return use(Tile<4, 2, 2>());
  if (columns <= 1536) return use(Tile<6, 2, 1>());
  if (columns <= 2048) return use(Tile<8, 2, 1>());
  with_wide_tile(columns, use);
}
template <class F>
void with_kind(NormKind kind, F&& use) {
  if (kind == NormKind::kRms) {
    return use(std::integral_constant<NormKind, NormKind::kRms>());
  }
  use(std::integral_constant<NormKind, NormKind::kLayer>());
}

/// Largest shared memory of a block on the current device.
int most_shared_bytes() {
  int device = 0, bytes = 48 * 1024;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return bytes;
}

}  // namespace

void add_norm_forward(const AddNormForward& args, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  with_kind(args.shape.kind, [&](auto kind) {
    with_forward_tile(args.shape.columns, [&](auto tile) {
      using T = decltype(tile);
      const auto blocks =
          static_cast<unsigned>((args.shape.rows + T::kRows - 1) / T::kRows);
      forward_kernel<decltype(kind)::value, T>
          <<<blocks, dim3(T::kLanes, T::kRows), 0, on>>>(args);
    });
  });
  check_launch("add_norm_forward");
}

void add_norm_backward(const AddNormBackward& args, void* stream) {
  const AddNormShape& shape = args.shape;
  const auto on = static_cast<cudaStream_t>(stream);
  const auto parts = static_cast<int>(shape.parts());
  const int most = most_shared_bytes();
  with_kind(shape.kind, [&](auto kind) {
    with_backward_tile(shape.columns, [&](auto tile) {
      using T = decltype(tile);
      const auto kernel = backward_kernel<decltype(kind)::value, T>;
      const int bytes = StagedRows<T>::bytes(shape);
      // Some shared memory is needed for the sums.
      const int stages = 2 * bytes + 1024 <= most ? 2 : 1;
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           stages * bytes);
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                           cudaSharedmemCarveoutMaxShared);
      kernel<<<parts, dim3(T::kLanes, T::kRows), stages * bytes, on>>>(args,
                                                                       stages);
    });
  });
  if (args.dweight != nullptr) {
    const auto columns = static_cast<int>(shape.columns);
    const unsigned gradients = shape.kind == NormKind::kLayer ? 2 : 1;
    merge_kernel<<<dim3((columns + 31) / 32, gradients), dim3(32, kMergers), 0,
                   on>>>(parts, columns, args.scratch, shape.weight,
                         args.dweight, args.dbias);
  }
  check_launch("add_norm_backward");
}

}  // namespace reprise::detail::kernels
