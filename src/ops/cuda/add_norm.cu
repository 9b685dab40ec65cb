#include "add_norm.h"
#include "load_store.cuh"

#include <algorithm>
#include <type_traits>

namespace reprise::detail::kernels {
namespace {

constexpr int kThreads = 128;  // per row
constexpr int kMergers = 16;   // threads that add up the parts of a column

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

/// Sums over the block, returned to every thread. All threads must call this.
__device__ float2 sum_over_block(float a, float b) {
  __shared__ float2 warps[kThreads / 32];
  for (int half = 16; half > 0; half /= 2) {
    a += __shfl_xor_sync(0xffffffffu, a, half);
    b += __shfl_xor_sync(0xffffffffu, b, half);
  }
  __syncthreads();  // the results of the previous call have been read
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = make_float2(a, b);
  __syncthreads();
  float2 sum = warps[0];
  for (int i = 1; i < kThreads / 32; ++i) {
    sum.x += warps[i].x;
    sum.y += warps[i].y;
  }
  return sum;
}

/// One block per row.
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

/// One block per part, `each` consecutive rows. A thread handles the same columns of every
/// row, and so adds up its share of the gradients of weight and bias in registers.
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
    float4 g[kFours], n[kFours];  // weighted gradients, normalized values
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

/// One block per 32 columns of the gradient of the weight (y = 0) or the bias (y = 1).
__global__ void merge_kernel(int parts, int columns, const float* scratch,
                             float* dweight, float* dbias) {
  const int column = blockIdx.x * 32 + threadIdx.x;
  const float* from = scratch + blockIdx.y * columns + column;
  const float total = sum_of_parts<kMergers>(parts, 2 * int64_t{columns}, from,
                                             column < columns);
  if (threadIdx.y != 0 || column >= columns) return;
  (blockIdx.y == 0 ? dweight : dbias)[column] = total;
}

/// Calls `use` with the number of float4 of a row per thread, rounded up to a power of 2.
template <class F>
void with_fours(int64_t columns, F&& use) {
  const int64_t fours = (columns / 4 + kThreads - 1) / kThreads;
  if (fours <= 1) return use(std::integral_constant<int, 1>());
  if (fours <= 2) return use(std::integral_constant<int, 2>());
  if (fours <= 4) return use(std::integral_constant<int, 4>());
  use(std::integral_constant<int, 8>());
}

template <class F>
void with_branch(DType type, F&& use) {
  if (type == DType::kNone) return use(static_cast<None*>(nullptr));
  with_type(type, use);
}

}  // namespace

void add_norm_forward(const AddNormForward& args, void* stream) {
  const AddNormShape& shape = args.shape;
  const auto on = static_cast<cudaStream_t>(stream);
  const auto columns = static_cast<int>(shape.columns);
  with_branch(shape.branch, [&](auto* b) {
    with_type(shape.normalized, [&](auto* r) {
      using Branch = std::remove_pointer_t<decltype(b)>;
      using Result = std::remove_pointer_t<decltype(r)>;
      forward_kernel<<<static_cast<unsigned>(shape.rows), kThreads,
                       columns * sizeof(float), on>>>(
          columns, args.x, static_cast<const Branch*>(args.branch), args.weight,
          args.bias, static_cast<float>(args.epsilon), args.sum,
          static_cast<Result*>(args.normalized), args.mean,
          args.inverse_deviation);
    });
  });
  check_launch("add_norm_forward");
}

void add_norm_backward(const AddNormBackward& args, void* stream) {
  const AddNormShape& shape = args.shape;
  const auto on = static_cast<cudaStream_t>(stream);
  const auto columns = static_cast<int>(shape.columns);
  const auto rows = static_cast<int>(shape.rows);
  const auto parts = static_cast<int>(shape.parts());
  // The gradient of a float32 branch is dx.
  const DType branch =
      shape.branch == DType::kFloat32 ? DType::kNone : shape.branch;
  with_branch(branch, [&](auto* b) {
    with_type(shape.normalized, [&](auto* r) {
      with_fours(shape.columns, [&](auto fours) {
        using Branch = std::remove_pointer_t<decltype(b)>;
        using Result = std::remove_pointer_t<decltype(r)>;
        backward_kernel<Branch, Result, decltype(fours)::value>
            <<<parts, kThreads, 0, on>>>(
                rows, columns, (rows + parts - 1) / parts, args.sum,
                static_cast<const Result*>(args.dnormalized), args.dsum,
                args.weight, args.mean, args.inverse_deviation, args.dx,
                static_cast<Branch*>(args.dbranch), args.scratch);
      });
    });
  });
  merge_kernel<<<dim3((columns + 31) / 32, 2), dim3(32, kMergers), 0, on>>>(
      parts, columns, args.scratch, args.dweight, args.dbias);
  check_launch("add_norm_backward");
}

}  // namespace reprise::detail::kernels
