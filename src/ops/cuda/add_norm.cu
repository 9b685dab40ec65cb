#include "add_norm.h"
#include "values.cuh"

#include <algorithm>
#include <type_traits>

namespace reprise::kernels {
namespace {

constexpr int kThreads = 128;  // of a row
constexpr int kMergers = 16;   // threads that share a column's parts
constexpr int64_t kRowsOfPart = 2;
constexpr int64_t kMostParts = 1024;

__device__ void add4(float4& to, float4 v) {
  to = make_float4(to.x + v.x, to.y + v.y, to.z + v.z, to.w + v.w);
}
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

/// A block some rows after each other, so that a thread meets the same columns in each:
/// it adds up what they give to the gradients of weight and bias.
template <class Branch, class Result, int kFours>
__global__ void backward_kernel(int rows, int columns, int each,
                                const float* sum, const Result* dresult,
                                const float* dsum, const float* weight,
                                const float* mean,
                                const float* inverse_deviation, float* dx,
                                Branch* dbranch, float* scratch) {
  const int fours = columns / 4;
  const int end = min(rows, static_cast<int>(blockIdx.x + 1) * each);
  float4 w[kFours], dweight[kFours], dbias[kFours];
#pragma unroll
  for (int k = 0; k < kFours; ++k) {
    const int i = threadIdx.x + k * kThreads;
    w[k] = i < fours ? load4(weight, i) : make_float4(0, 0, 0, 0);
    dweight[k] = dbias[k] = make_float4(0, 0, 0, 0);
  }
  for (int r = blockIdx.x * each; r < end; ++r) {
    const int64_t first = static_cast<int64_t>(r) * columns;
    const float average = mean[r], inverse = inverse_deviation[r];
    float4 g[kFours], n[kFours];  // weighted gradients, normalised values
    float total = 0, product = 0;
#pragma unroll
    for (int k = 0; k < kFours; ++k) {
      const int i = threadIdx.x + k * kThreads;
      if (i >= fours) continue;
      const float4 v = load4(sum + first, i), d = load4(dresult + first, i);
      n[k] = make_float4((v.x - average) * inverse, (v.y - average) * inverse,
                         (v.z - average) * inverse, (v.w - average) * inverse);
      g[k] = make_float4(d.x * w[k].x, d.y * w[k].y, d.z * w[k].z,
                         d.w * w[k].w);
      total += (g[k].x + g[k].y) + (g[k].z + g[k].w);
      product += (g[k].x * n[k].x + g[k].y * n[k].y) +
                 (g[k].z * n[k].z + g[k].w * n[k].w);
      add4(dbias[k], d);
      add4(dweight[k], make_float4(d.x * n[k].x, d.y * n[k].y, d.z * n[k].z,
                                   d.w * n[k].w));
    }
    const float2 sums = sum_over_block(total, product);
    const float lost = sums.x / columns, tilt = sums.y / columns;
#pragma unroll
    for (int k = 0; k < kFours; ++k) {
      const int i = threadIdx.x + k * kThreads;
      if (i >= fours) continue;
      float4 d = make_float4(inverse * (g[k].x - lost - n[k].x * tilt),
                             inverse * (g[k].y - lost - n[k].y * tilt),
                             inverse * (g[k].z - lost - n[k].z * tilt),
                             inverse * (g[k].w - lost - n[k].w * tilt));
      if (dsum != nullptr) add4(d, load4(dsum + first, i));
      store4(dx + first, i, d);
      if constexpr (sizeof(Branch) == 2) store4(dbranch + first, i, d);
    }
  }
  float* mine = scratch + 2 * static_cast<int64_t>(blockIdx.x) * columns;
#pragma unroll
  for (int k = 0; k < kFours; ++k) {
    const int i = threadIdx.x + k * kThreads;
    if (i >= fours) continue;
    store4(mine, i, dweight[k]);
    store4(mine + columns, i, dbias[k]);
  }
}

/// For 32 columns, of the weight's gradient or of the bias's.
__global__ void merge_kernel(int parts, int columns, const float* scratch,
                             float* dweight, float* dbias) {
  const int column = blockIdx.x * 32 + threadIdx.x;
  const float* from = scratch + blockIdx.y * columns + column;
  const float total = sum_of_parts<kMergers>(parts, 2 * int64_t{columns}, from,
                                             column < columns);
  if (threadIdx.y != 0 || column >= columns) return;
  (blockIdx.y == 0 ? dweight : dbias)[column] = total;
}

/// Calls `use` with how many fours of a row a thread has, rounded up.
template <class F>
void with_fours(int64_t columns, F&& use) {
  const int64_t fours = (columns / 4 + kThreads - 1) / kThreads;
  if (fours <= 1) return use(std::integral_constant<int, 1>());
  if (fours <= 2) return use(std::integral_constant<int, 2>());
  if (fours <= 4) return use(std::integral_constant<int, 4>());
  use(std::integral_constant<int, 8>());
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
  return std::clamp<int64_t>((rows + kRowsOfPart - 1) / kRowsOfPart, 1,
                             kMostParts);
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
  // Of the branch's gradient matters whether there is one besides dx.
  const Values branch =
      shape.branch == Values::kSingle ? Values::kNone : shape.branch;
  with_branch(branch, [&](auto* b) {
    with_values(shape.result, [&](auto* r) {
      with_fours(shape.columns, [&](auto fours) {
        using Branch = std::remove_pointer_t<decltype(b)>;
        using Result = std::remove_pointer_t<decltype(r)>;
        backward_kernel<Branch, Result, decltype(fours)::value>
            <<<parts, kThreads, 0, on>>>(
                rows, columns, (rows + parts - 1) / parts, sum,
                static_cast<const Result*>(dresult), dsum, weight, mean,
                inverse_deviation, dx, static_cast<Branch*>(dbranch), scratch);
      });
    });
  });
  merge_kernel<<<dim3((columns + 31) / 32, 2), dim3(32, kMergers), 0, on>>>(
      parts, columns, scratch, dweight, dbias);
  check_launch("add_norm");
}

}  // namespace reprise::kernels
