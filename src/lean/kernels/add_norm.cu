#include "add_norm.h"
#include "values.cuh"

#include <algorithm>
#include <type_traits>

namespace reprise::kernels {
namespace {

constexpr int kThreads = 128;  // of a row
constexpr int kColumns = 32;   // of a block that adds columns up, and its rows
constexpr int kRows = 8;
constexpr int64_t kRowsOfPart = 64;
constexpr int64_t kMostParts = 64;

template <class T>
__device__ T* advance(T* from, int64_t count) {
  return from + count;
}
__device__ const None* advance(const None* from, int64_t) {
  return from;
}

/// Sums over the block, in every thread. To be called by all of it.
__device__ float2 sum_over_block(float a, float b) {
  __shared__ float2 warps[kThreads / 32];
  for (int half = 16; half > 0; half /= 2) {
    a += __shfl_xor_sync(0xffffffffu, a, half);
    b += __shfl_xor_sync(0xffffffffu, b, half);
  }
  __syncthreads();  // those of the sum before have been read
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = make_float2(a, b);
  __syncthreads();
  float2 sum = warps[0];
  for (int i = 1; i < kThreads / 32; ++i) {
    sum.x += warps[i].x;
    sum.y += warps[i].y;
  }
  return sum;
}

/// A block a row.
template <class Branch, class Result>
__global__ void forward_kernel(int columns, const float* x,
                               const Branch* branch, const float* weight,
                               const float* bias, float epsilon, float* sum,
                               Result* result, float* mean,
                               float* inverse_deviation) {
  extern __shared__ float4 row[];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * columns;
  const int fours = columns / 4;
  const Branch* added = advance(branch, first);
  float total = 0;
  for (int i = threadIdx.x; i < fours; i += kThreads) {
    float4 v = load4(x + first, i);
    if (sum != nullptr) {
      const float4 b = load4(added, i);
      v = make_float4(v.x + b.x, v.y + b.y, v.z + b.z, v.w + b.w);
      store4(sum + first, i, v);
    }
    row[i] = v;
    total += (v.x + v.y) + (v.z + v.w);
  }
  const float average = sum_over_block(total, 0).x / columns;
  float squares = 0;
  for (int i = threadIdx.x; i < fours; i += kThreads) {
    const float4 v = row[i];  // written by this thread
    const float a = v.x - average, b = v.y - average, c = v.z - average,
                d = v.w - average;
    squares += (a * a + b * b) + (c * c + d * d);
  }
  const float inverse =
      rsqrtf(sum_over_block(squares, 0).x / columns + epsilon);
  for (int i = threadIdx.x; i < fours; i += kThreads) {
    const float4 v = row[i], w = load4(weight, i), b = load4(bias, i);
    store4(result + first, i,
           make_float4((v.x - average) * inverse * w.x + b.x,
                       (v.y - average) * inverse * w.y + b.y,
                       (v.z - average) * inverse * w.z + b.z,
                       (v.w - average) * inverse * w.w + b.w));
  }
  if (threadIdx.x == 0) {
    mean[blockIdx.x] = average;
    inverse_deviation[blockIdx.x] = inverse;
  }
}

/// A block a row.
template <class Branch, class Result>
__global__ void backward_kernel(int columns, const float* sum,
                                const Result* dresult, const float* dsum,
                                const float* weight, const float* mean,
                                const float* inverse_deviation, float* dx,
                                Branch* dbranch) {
  // The weighted gradients, then the normalised values.
  extern __shared__ float4 row[];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * columns;
  const int fours = columns / 4;
  float4* normal = row + fours;
  const float average = mean[blockIdx.x], inverse = inverse_deviation[blockIdx.x];
  float total = 0, product = 0;
  for (int i = threadIdx.x; i < fours; i += kThreads) {
    const float4 v = load4(sum + first, i), d = load4(dresult + first, i),
                 w = load4(weight, i);
    const float4 g = make_float4(d.x * w.x, d.y * w.y, d.z * w.z, d.w * w.w);
    const float4 n =
        make_float4((v.x - average) * inverse, (v.y - average) * inverse,
                    (v.z - average) * inverse, (v.w - average) * inverse);
    row[i] = g;
    normal[i] = n;
    total += (g.x + g.y) + (g.z + g.w);
    product += (g.x * n.x + g.y * n.y) + (g.z * n.z + g.w * n.w);
  }
  const float2 sums = sum_over_block(total, product);
  const float lost = sums.x / columns, tilt = sums.y / columns;
  for (int i = threadIdx.x; i < fours; i += kThreads) {
    const float4 g = row[i], n = normal[i];
    float4 d = make_float4(inverse * (g.x - lost - n.x * tilt),
                           inverse * (g.y - lost - n.y * tilt),
                           inverse * (g.z - lost - n.z * tilt),
                           inverse * (g.w - lost - n.w * tilt));
    if (dsum != nullptr) {
      const float4 more = load4(dsum + first, i);
      d = make_float4(d.x + more.x, d.y + more.y, d.z + more.z, d.w + more.w);
    }
    store4(dx + first, i, d);
    if constexpr (sizeof(Branch) == 2) store4(dbranch + first, i, d);
  }
}

/// Sums over some rows for 32 columns: of the gradients, and of their products with the
/// normalised values.
template <class Result>
__global__ void columns_kernel(int rows, int columns, int each,
                               const float* sum, const Result* dresult,
                               const float* mean,
                               const float* inverse_deviation, float* scratch) {
  __shared__ float2 shared[kRows][kColumns];
  const int column = blockIdx.x * kColumns + threadIdx.x;
  const int begin = blockIdx.y * each;
  const int end = begin + each < rows ? begin + each : rows;
  float2 total = make_float2(0, 0);
  if (column < columns) {
    for (int r = begin + threadIdx.y; r < end; r += kRows) {
      const int64_t at = static_cast<int64_t>(r) * columns + column;
      const float d = load1(dresult, at);
      total.x += d;
      total.y += d * ((sum[at] - mean[r]) * inverse_deviation[r]);
    }
  }
  shared[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  for (int i = 1; i < kRows; ++i) {
    total.x += shared[i][threadIdx.x].x;
    total.y += shared[i][threadIdx.x].y;
  }
  scratch[(2 * blockIdx.y) * columns + column] = total.x;
  scratch[(2 * blockIdx.y + 1) * columns + column] = total.y;
}

__global__ void merge_kernel(int parts, int columns, const float* scratch,
                             float* dweight, float* dbias) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  float bias = 0, weight = 0;
  for (int i = 0; i < parts; ++i) {
    bias += scratch[(2 * i) * columns + column];
    weight += scratch[(2 * i + 1) * columns + column];
  }
  dbias[column] = bias;
  dweight[column] = weight;
}

template <class F>
void with_branch(Values values, F&& use) {
  if (values == Values::kNone) return use(static_cast<None*>(nullptr));
  with_values(values, use);
}

}  // namespace

bool add_norm_kernels_built() {
  return true;
}

int64_t RowsShape::parts() const {
  return std::clamp<int64_t>(rows / kRowsOfPart, 1, kMostParts);
}

void add_norm_forward(const RowsShape& shape, const float* x,
                      const void* branch, const float* weight,
                      const float* bias, double epsilon, float* sum,
                      void* result, float* mean, float* inverse_deviation,
                      void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const auto columns = static_cast<int>(shape.columns);
  with_branch(shape.branch, [&](auto* b) {
    with_values(shape.result, [&](auto* r) {
      using Branch = std::remove_pointer_t<decltype(b)>;
      using Result = std::remove_pointer_t<decltype(r)>;
      forward_kernel<<<static_cast<unsigned>(shape.rows), kThreads,
                       columns * sizeof(float), on>>>(
          columns, x, static_cast<const Branch*>(branch), weight, bias,
          static_cast<float>(epsilon), sum, static_cast<Result*>(result), mean,
          inverse_deviation);
    });
  });
  check_launch("add_norm");
}

void add_norm_backward(const RowsShape& shape, const float* sum,
                       const void* dresult, const float* dsum,
                       const float* weight, const float* mean,
                       const float* inverse_deviation, float* scratch,
                       float* dx, void* dbranch, float* dweight, float* dbias,
                       void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const auto columns = static_cast<int>(shape.columns);
  const auto rows = static_cast<int>(shape.rows);
  const auto parts = static_cast<int>(shape.parts());
  with_branch(shape.branch, [&](auto* b) {
    with_values(shape.result, [&](auto* r) {
      using Branch = std::remove_pointer_t<decltype(b)>;
      using Result = std::remove_pointer_t<decltype(r)>;
      backward_kernel<Branch, Result>
          <<<static_cast<unsigned>(shape.rows), kThreads,
             2 * columns * sizeof(float), on>>>(
              columns, sum, static_cast<const Result*>(dresult), dsum, weight,
              mean, inverse_deviation, dx, static_cast<Branch*>(dbranch));
    });
  });
  const dim3 threads(kColumns, kRows);
  const dim3 blocks((columns + kColumns - 1) / kColumns, parts);
  with_values(shape.result, [&](auto* r) {
    using Result = std::remove_pointer_t<decltype(r)>;
    columns_kernel<<<blocks, threads, 0, on>>>(
        rows, columns, (rows + parts - 1) / parts, sum,
        static_cast<const Result*>(dresult), mean, inverse_deviation, scratch);
  });
  merge_kernel<<<(columns + 127) / 128, 128, 0, on>>>(parts, columns, scratch,
                                                     dweight, dbias);
  check_launch("add_norm");
}

}  // namespace reprise::kernels
