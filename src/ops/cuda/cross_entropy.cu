// Note [One pass over a row of scores]
// Sum of exponentials and gradient need the scores twice. gradient_kernel() copies a row to
// shared memory with asynchronous copies and adds up exponentials while it arrives. A row of
// 50,304 scores has 100 kB, so that two blocks fit into a multiprocessor: one loads while
// the other computes. Longer rows are divided between the blocks of a cluster, which
// exchange their sums. Each thread reads only the vectors that it has copied itself.
//
// forward_kernel(), without gradients, must give the same loss: it divides and adds in the
// same order. __fmul_rn() keeps the compiler from fusing products with sums in one of them.
#include "cross_entropy.h"
#include "async_copy.cuh"
#include "load_store.cuh"

#include <cooperative_groups.h>

#include <algorithm>
#include <cassert>
#include <type_traits>

namespace reprise::detail::kernels {
namespace {

constexpr int kThreads = 512;  // per row, or part of a row
constexpr int kWarps = kThreads / 32;
constexpr int kBatch = 4;  // vectors of eight scores that a thread handles together
constexpr int kMaxParts = 8;
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;
constexpr int kNoPlace = 0x7fffffff;

/// 2^x, relative error 2^-22; 0 instead of denormal values.
__device__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Larger values of two pairs; a NaN is ignored.
template <class T>
__device__ unsigned larger_pair(unsigned a, unsigned b) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const Pair both =
      __hmax2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b));
  return reinterpret_cast<const unsigned&>(both);
}

template <class T>
__device__ Eight<T> minus_infinities() {
  constexpr unsigned kPair = std::is_same_v<T, __half> ? 0xfc00fc00u : 0xff80ff80u;
  return {make_uint4(kPair, kPair, kPair, kPair)};
}

/// Online softmax: the largest score so far, and the sum of exponentials relative to it, as
/// powers of two: 2^(score · kLog2E - scaled()). `place` is the first column that has the
/// largest score, if it is needed.
struct Running {
  float largest = -INFINITY;
  float total = 0;
  int place = kNoPlace;

  static __device__ float scaled(float score) {
    return score == -INFINITY ? 0 : __fmul_rn(score, kLog2E);
  }
  /// Factor that makes `total` relative to `other`, which is at least `largest`.
  __device__ float factor_for(float other) const {
    return largest == -INFINITY ? 0 : fast_exp2(scaled(largest) - scaled(other));
  }
  /// Log-sum-exp. Exactly `largest` if all other exponentials are 0: the rounding of
  /// scaled() is known and subtracted.
  __device__ float log_sum_exp() const {
    const float rounding = fmaf(-largest, kLog2E, scaled(largest));
    return largest + (log2f(total) + rounding) * kLn2;
  }
  /// log_sum_exp() / ln(2), to the relative precision of the exponentials.
  __device__ float log2_sum_exp() const { return scaled(largest) + log2f(total); }
};

/// Part of a row of scores that one block handles, in vectors of eight scores.
struct RowPart {
  int first, count;  // vectors
  int columns;       // of the row without padding

  __device__ RowPart(int64_t stride, int columns, int part, int parts)
      : columns(columns) {
    const int vectors = static_cast<int>(stride / 8);
    const int each = (vectors + parts - 1) / parts;
    first = part * each;
    count = max(0, min(each, vectors - first));
  }
  /// Vectors without padding.
  __device__ int whole() const { return columns / 8 - first; }
  /// Vector `i` of the part with its padding replaced by minus infinity.
  template <class T>
  __device__ Eight<T> with_padding(Eight<T> eight, int i) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float2 two = eight.pair(j);
      const int column = 8 * (first + i) + 2 * j;
      if (column >= columns) two.x = -INFINITY;
      if (column + 1 >= columns) two.y = -INFINITY;
      eight.set_pair(j, two);
    }
    return eight;
  }
};

/// Adds vectors i, i + kThreads, … of the part, as many as it has, to `running`.
template <bool kPlace, class T>
__device__ void add_batch(const Eight<T> (&batch)[kBatch], int i, const RowPart& part,
                          Running& running) {
  unsigned pair = larger_pair<T>(batch[0].bits.x, batch[0].bits.y);
  pair = larger_pair<T>(pair, larger_pair<T>(batch[0].bits.z, batch[0].bits.w));
#pragma unroll
  for (int j = 1; j < kBatch; ++j) {
    const uint4& bits = batch[j].bits;
    pair = larger_pair<T>(pair, larger_pair<T>(larger_pair<T>(bits.x, bits.y),
                                               larger_pair<T>(bits.z, bits.w)));
  }
  const float2 two = Eight<T>{make_uint4(pair, 0, 0, 0)}.pair(0);
  const float largest = fmaxf(two.x, two.y);
  const float next = fmaxf(running.largest, largest);
  if (kPlace && next > running.largest) {
    int place = kNoPlace;
    for (int j = 0; j < kBatch; ++j) {
      for (int k = 0; k < 4; ++k) {
        const float2 v = batch[j].pair(k);
        const int column = 8 * (part.first + i + j * kThreads) + 2 * k;
        if (v.x == largest) place = min(place, column);
        if (v.y == largest) place = min(place, column + 1);
      }
    }
    running.place = place;
  }
  running.total = __fmul_rn(running.total, running.factor_for(next));
  running.largest = next;
  const float shift = -Running::scaled(next);
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    if (i + j * kThreads >= part.count) break;
    float sum = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float2 v = batch[j].pair(k);
      sum += fast_exp2(fmaf(v.x, kLog2E, shift)) + fast_exp2(fmaf(v.y, kLog2E, shift));
    }
    running.total += sum;
  }
}

/// Combines the first `lanes` lanes of a warp, a power of two; all of them get the result.
__device__ Running merge_over_lanes(Running running, int lanes) {
  float largest = running.largest;
  for (int half = lanes / 2; half > 0; half /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, half));
  }
  running.total = __fmul_rn(running.total, running.factor_for(largest));
  if (running.largest != largest) running.place = kNoPlace;
  running.largest = largest;
  for (int half = lanes / 2; half > 0; half /= 2) {
    running.total += __shfl_xor_sync(0xffffffffu, running.total, half);
    running.place = min(running.place, __shfl_xor_sync(0xffffffffu, running.place, half));
  }
  return running;
}

/// Returns the result to all threads.
__device__ Running merge_over_block(Running running) {
  __shared__ Running warps[kWarps];
  running = merge_over_lanes(running, 32);
  __syncthreads();  // the last call has been read
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = running;
  __syncthreads();
  return merge_over_lanes(warps[threadIdx.x % kWarps], kWarps);
}

/// Combines get(0), …, get(parts - 1), the results of the parts of a row.
template <class F>
__device__ Running merge_parts(int parts, F&& get) {
  Running all;
  for (int i = 0; i < parts; ++i) all.largest = fmaxf(all.largest, get(i).largest);
  for (int i = 0; i < parts; ++i) {
    const Running part = get(i);
    all.total = fmaf(part.total, part.factor_for(all.largest), all.total);
    if (part.largest == all.largest) all.place = min(all.place, part.place);
  }
  return all;
}

/// Arguments of the kernels of one row.
template <class T>
struct Rows {
  int columns;
  int64_t stride;
  T* scores;
  const int64_t* targets;
  int64_t ignore_index;
  float* log_sum_exp;
  float* target_log_prob;

  /// Target of a row; -1 if it is ignored.
  __device__ int target(int64_t row) const {
    const int64_t target = targets[row];
    if (target == ignore_index) return -1;
    assert(target >= 0 && target < columns);  // as in LibTorch's losses
    return static_cast<int>(target);
  }
  __device__ void store(int64_t row, float total, float log_prob) const {
    log_sum_exp[row] = total;
    target_log_prob[row] = log_prob;
  }
};

/// One block per row, which handles one part after another.
template <class T, bool kPlace>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(Rows<T> rows, int parts, unsigned long long* correct) {
  __shared__ Running totals[kMaxParts];
  const int64_t row = blockIdx.x;
  const int target = rows.target(row);
  if (target < 0) {
    if (threadIdx.x == 0) rows.store(row, INFINITY, 0);
    return;
  }
  const T* scores = rows.scores + row * rows.stride;
  for (int p = 0; p < parts; ++p) {
    const RowPart part(rows.stride, rows.columns, p, parts);
    const auto* eights = reinterpret_cast<const Eight<T>*>(scores) + part.first;
    Eight<T> batch[kBatch], next[kBatch];
    const auto load = [&](int i) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int k = i + j * kThreads;
        next[j] = k < part.count ? eights[k] : minus_infinities<T>();
      }
    };
    Running running;
    load(threadIdx.x);
    for (int i = threadIdx.x; i < part.count; i += kBatch * kThreads) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        batch[j] = next[j];
        const int k = i + j * kThreads;
        if (k >= part.whole() && k < part.count) {
          batch[j] = part.with_padding(batch[j], k);
        }
      }
      load(i + kBatch * kThreads);
      add_batch<kPlace>(batch, i, part, running);
    }
    running = merge_over_block(running);
    if (threadIdx.x == 0) totals[p] = running;
  }
  if (threadIdx.x != 0) return;
  const Running all = merge_parts(parts, [&](int p) { return totals[p]; });
  const float total = all.log_sum_exp();
  rows.store(row, total, load1(scores, target) - total);
  if (kPlace && all.place == target) atomicAdd(correct, 1ull);
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

/// Copies a part of a row to shared memory and returns its sum of exponentials, to all
/// threads.
template <class T>
__device__ Running load_and_add(const Eight<T>* row, const RowPart& part, uint4* shared) {
  int groups = 0;
  for (int i = threadIdx.x; i < part.count; i += kBatch * kThreads, ++groups) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int k = i + j * kThreads;
      if (k < part.whole() && k < part.count) {
        copy_async(shared + k, row + k);
      } else if (k < part.count) {
        shared[k] = part.with_padding(row[k], k).bits;
      }
    }
    commit_copies();
  }
  Running running;
  for (int i = threadIdx.x; i < part.count; i += kBatch * kThreads) {
    wait_for_copies(--groups);
    Eight<T> batch[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int k = i + j * kThreads;
      batch[j] = k < part.count ? Eight<T>{shared[k]} : minus_infinities<T>();
    }
    add_batch<false>(batch, i, part, running);
  }
  return merge_over_block(running);
}

/// Combines the results of the blocks of a cluster. They must not exit before the others
/// have called this: cluster_barrier_wait() is due afterwards.
__device__ Running merge_over_cluster(const Running& mine) {
#if __CUDA_ARCH__ >= 900
  __shared__ Running block_total;
  const auto cluster = cooperative_groups::this_cluster();
  if (threadIdx.x == 0) block_total = mine;
  cluster.sync();
  const Running all =
      merge_parts(static_cast<int>(cluster.num_blocks()), [&](int rank) {
        return *cluster.map_shared_rank(&block_total, static_cast<unsigned>(rank));
      });
  cluster.barrier_arrive();
  return all;
#else
  return mine;
#endif
}
__device__ void cluster_barrier_wait() {
#if __CUDA_ARCH__ >= 900
  cooperative_groups::this_cluster().barrier_wait();
#endif
}

/// One block per part of a row; the parts of a row are a cluster if there are several.
template <class T, bool kCluster>
__global__ void __launch_bounds__(kThreads, 2) gradient_kernel(Rows<T> rows, int parts) {
  extern __shared__ uint4 shared[];
  const int block = static_cast<int>(blockIdx.x);
  const int64_t row = kCluster ? block / parts : block;
  const int rank = kCluster ? block % parts : 0;
  const RowPart part(rows.stride, rows.columns, rank, parts);
  T* scores = rows.scores + row * rows.stride;
  auto* eights = reinterpret_cast<Eight<T>*>(scores) + part.first;
  const int target = rows.target(row);
  if (target < 0) {
    for (int i = threadIdx.x; i < part.count; i += kThreads) {
      eights[i] = {make_uint4(0, 0, 0, 0)};
    }
    if (rank == 0 && threadIdx.x == 0) rows.store(row, INFINITY, 0);
    return;
  }
  const float target_score = load1(scores, target);
  Running running = load_and_add(eights, part, shared);
  if (kCluster) running = merge_over_cluster(running);
  const float total2 = running.log2_sum_exp();
#pragma unroll 4
  for (int i = threadIdx.x; i < part.count; i += kThreads) {
    Eight<T> eight{shared[i]};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float2 two = eight.pair(j);
      two.x = fast_exp2(fmaf(two.x, kLog2E, -total2));
      two.y = fast_exp2(fmaf(two.y, kLog2E, -total2));
      eight.set_pair(j, two);
    }
    eights[i] = eight;
  }
  const float total = running.log_sum_exp();
  const float log_prob = target_score - total;
  if (rank == 0 && threadIdx.x == 0) rows.store(row, total, log_prob);
  // Written by the thread that has written the vector.
  const int i = target / 8 - part.first;
  if (i >= 0 && i < part.count && i % kThreads == threadIdx.x) {
    scores[target] = static_cast<T>(expm1f(log_prob));
  }
  if (kCluster) cluster_barrier_wait();
}

int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&value, attribute, device) != cudaSuccess) {
    return 0;
  }
  return value;
}

/// Bytes of a part of a row if it is divided into `parts`.
int64_t part_bytes(const ScoresShape& shape, int parts) {
  return (shape.stride / 8 + parts - 1) / parts * 16;
}

/// Number of blocks that share a row in gradient_kernel(); 0 if the row is too long.
int parts_of(const ScoresShape& shape) {
  constexpr int64_t kStaticBytes = 1024;
  const int64_t block_bytes =
      device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kStaticBytes;
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) < 9) {
    return part_bytes(shape, 1) <= block_bytes ? 1 : 0;
  }
  // Two blocks per multiprocessor, each with 1 KiB of the system.
  const int64_t half =
      device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / 2 - 1024 -
      kStaticBytes;
  for (int parts = 1; parts <= kMaxParts; parts *= 2) {
    if (part_bytes(shape, parts) <= std::min(half, block_bytes)) return parts;
  }
  return 0;
}

template <class T, class Arguments>
Rows<T> rows_of(const Arguments& args) {
  return {static_cast<int>(args.shape.classes),
          args.shape.stride,
          static_cast<T*>(const_cast<void*>(args.scores)),
          args.targets,
          args.ignore_index,
          args.log_sum_exp,
          args.target_log_prob};
}

template <class T>
void launch_gradient(const CrossEntropyGradient& args, int parts, cudaStream_t stream) {
  const auto kernel = parts > 1 ? gradient_kernel<T, true> : gradient_kernel<T, false>;
  const auto bytes = static_cast<int>(part_bytes(args.shape, parts));
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                       cudaSharedmemCarveoutMaxShared);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(args.shape.rows * parts));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(parts), 1, 1};
  config.attrs = &cluster;
  config.numAttrs = parts > 1 ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, rows_of<T>(args), parts);
}

}  // namespace

void cross_entropy_forward(const CrossEntropyForward& args, void* stream) {
  const ScoresShape& shape = args.shape;
  if (shape.rows == 0) return;
  with_half(shape.type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto kernel =
        args.correct != nullptr ? forward_kernel<T, true> : forward_kernel<T, false>;
    kernel<<<static_cast<unsigned>(shape.rows), kThreads, 0,
             static_cast<cudaStream_t>(stream)>>>(
        rows_of<T>(args), std::max(parts_of(shape), 1),
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

void cross_entropy_gradient(const CrossEntropyGradient& args, void* stream) {
  const ScoresShape& shape = args.shape;
  if (shape.rows == 0) return;
  const int parts = parts_of(shape);
  if (parts == 0) {
    cross_entropy_forward({shape, args.scores, args.targets, args.ignore_index,
                           args.log_sum_exp, args.target_log_prob, nullptr},
                          stream);
    cross_entropy_backward({shape, args.scores, args.targets, args.ignore_index,
                            args.log_sum_exp, args.target_log_prob},
                           stream);
    return;
  }
  with_half(shape.type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    launch_gradient<T>(args, parts, static_cast<cudaStream_t>(stream));
  });
  check_launch("cross_entropy_gradient");
}

}  // namespace reprise::detail::kernels
