#include "cross_entropy.h"
#include "load_store.cuh"

#include <cassert>
#include <type_traits>

namespace reprise::detail::kernels {
namespace {

constexpr int kThreads = 512;  // per row
constexpr int kWarps = kThreads / 32;

/// Online softmax: the largest score so far, the first column that has it, and the sum of
/// exponentials relative to it.
struct Running {
  float largest = -INFINITY;
  float total = 0;
  int place = 0x7fffffff;
};

__device__ Running merge(const Running& a, const Running& b) {
  Running c;
  c.largest = fmaxf(a.largest, b.largest);
  if (c.largest == -INFINITY) return c;  // both are empty
  c.total = a.total * __expf(a.largest - c.largest) +
            b.total * __expf(b.largest - c.largest);
  c.place = a.largest > b.largest   ? a.place
            : b.largest > a.largest ? b.place
                                    : min(a.place, b.place);
  return c;
}

__device__ Running merge_over_block(Running running) {
  __shared__ Running warps[kWarps];
  for (int half = 16; half > 0; half /= 2) {
    Running other;
    other.largest = __shfl_xor_sync(0xffffffffu, running.largest, half);
    other.total = __shfl_xor_sync(0xffffffffu, running.total, half);
    other.place = __shfl_xor_sync(0xffffffffu, running.place, half);
    running = merge(running, other);
  }
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = running;
  __syncthreads();
  Running all = warps[0];
  for (int i = 1; i < kWarps; ++i) all = merge(all, warps[i]);
  return all;
}

/// One block per row.
template <class T>
__global__ void forward_kernel(int columns, int64_t stride, const T* scores,
                               const int64_t* targets, int64_t ignore_index,
                               float* log_sum_exp, float* target_log_prob,
                               unsigned long long* correct) {
  const T* row = scores + blockIdx.x * stride;
  const auto* eights = reinterpret_cast<const Eight<T>*>(row);
  Running running;
  for (int i = threadIdx.x; 8 * i < columns; i += kThreads) {
    const Eight<T> eight = eights[i];
    float v[8];
    float largest = -INFINITY;
    int place = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 two = eight.pair(j);
      v[2 * j] = two.x;
      v[2 * j + 1] = two.y;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (8 * i + j >= columns) v[j] = -INFINITY;
      if (v[j] > largest) {
        largest = v[j];
        place = 8 * i + j;
      }
    }
    if (largest > running.largest) {
      running.total *= __expf(running.largest - largest);
      running.largest = largest;
      running.place = place;
    }
    if (running.largest == -INFINITY) continue;
#pragma unroll
    for (int j = 0; j < 8; ++j) running.total += __expf(v[j] - running.largest);
  }
  running = merge_over_block(running);
  if (threadIdx.x != 0) return;
  const int64_t target = targets[blockIdx.x];
  // As in LibTorch's losses.
  assert(target == ignore_index || (target >= 0 && target < columns));
  const float total = running.largest + logf(running.total);
  log_sum_exp[blockIdx.x] = total;
  target_log_prob[blockIdx.x] = load1(row, target == ignore_index ? 0 : target) - total;
  if (correct != nullptr && running.place == target) atomicAdd(correct, 1ull);
}

/// One block per row.
template <class T>
__global__ void backward_kernel(int columns, int64_t stride, T* scores,
                                const int64_t* targets, int64_t ignore_index,
                                const float* log_sum_exp, const float* target_log_prob) {
  auto* eights = reinterpret_cast<Eight<T>*>(scores + blockIdx.x * stride);
  const float total = log_sum_exp[blockIdx.x];
  const int64_t target =
      targets[blockIdx.x] == ignore_index ? 0 : targets[blockIdx.x];
  for (int i = threadIdx.x; 8 * i < stride; i += kThreads) {
    Eight<T> eight = eights[i];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float2 two = eight.pair(j);
      const int column = 8 * i + 2 * j;
      two.x = column < columns ? __expf(two.x - total) : 0;
      two.y = column + 1 < columns ? __expf(two.y - total) : 0;
      if (column == target) two.x = expm1f(target_log_prob[blockIdx.x]);
      if (column + 1 == target) two.y = expm1f(target_log_prob[blockIdx.x]);
      eight.set_pair(j, two);
    }
    eights[i] = eight;
  }
}

}  // namespace

void cross_entropy_forward(const CrossEntropyForward& args, void* stream) {
  const ScoresShape& shape = args.shape;
  if (shape.rows == 0) return;
  with_half(shape.type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    forward_kernel<T><<<static_cast<unsigned>(shape.rows), kThreads, 0,
                        static_cast<cudaStream_t>(stream)>>>(
        static_cast<int>(shape.classes), shape.stride,
        static_cast<const T*>(args.scores), args.targets, args.ignore_index,
        args.log_sum_exp, args.target_log_prob,
        reinterpret_cast<unsigned long long*>(args.correct));
  });
  check_launch("cross_entropy_forward");
}

void cross_entropy_backward(const CrossEntropyBackward& args, void* stream) {
  const ScoresShape& shape = args.shape;
  if (shape.rows == 0) return;
  with_half(shape.type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    backward_kernel<T><<<static_cast<unsigned>(shape.rows), kThreads, 0,
                         static_cast<cudaStream_t>(stream)>>>(
        static_cast<int>(shape.classes), shape.stride,
        static_cast<T*>(args.scores), args.targets, args.ignore_index,
        args.log_sum_exp, args.target_log_prob);
  });
  check_launch("cross_entropy_backward");
}

}  // namespace reprise::detail::kernels
