#include "norm_statistics.h"
#include "rows.cuh"

#include <type_traits>

namespace reprise::detail::kernels {
namespace {

constexpr int kColumns = 8;  // of a block that merges partial results of channels
constexpr int kWays = 64;    // threads per column
constexpr int kGroupThreads = 128;  // of a block that merges those of a group

/// Mean, and sum of squared differences from it, of a part of each column.
///
/// A thread computes them relative to the mean of its first rows, since the sum of squares
/// of values with a large mean would cancel. Threads are merged as in Chan et al. 1983.
template <class T>
__global__ void __launch_bounds__(kRowThreads, 4)
    moments_kernel(Tiles t, const uint4* x, float2* scratch) {
  constexpr int kWidth = kVector<T>;
  constexpr int kBatch = 4;
  __shared__ float2 shared[kWidth][kRowThreads];
  __shared__ int counts[kRowThreads];
  const Place place(t);
  float origin[kWidth] = {}, sum[kWidth] = {}, squares[kWidth] = {};
  if (place.count > 0) {
    uint4 bits[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      bits[u] = x[place.at(min(u, place.count - 1))];
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      float v[kWidth];
      unpack<T>(bits[u], v);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        origin[j] = fmaf(v[j], 1.0f / kBatch, origin[j]);
      }
    }
  }
  for (int i = 0; i < place.count; i += kBatch) {
    uint4 bits[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      bits[u] = x[place.at(min(i + u, place.count - 1))];
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      if (i + u >= place.count) continue;
      float v[kWidth];
      unpack<T>(bits[u], v);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float d = v[j] - origin[j];
        sum[j] += d;
        squares[j] = fmaf(d, d, squares[j]);
      }
    }
  }
  const int thread = static_cast<int>(threadIdx.x);
  const float share = place.count > 0 ? 1.0f / place.count : 0;
  counts[thread] = place.count;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const float off = sum[j] * share;
    shared[j][thread] = make_float2(origin[j] + off, squares[j] - sum[j] * off);
  }
  for (int n = t.down; n > 1;) {
    const int half = (n + 1) / 2;
    __syncthreads();
    const int other = thread + half * t.across;
    if (place.row_of_block + half < n && counts[other] > 0) {
      const float mine = static_cast<float>(counts[thread]);
      const float theirs = static_cast<float>(counts[other]);
      const float part = theirs / (mine + theirs);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float2 b = shared[j][other];
        float2& a = shared[j][thread];
        const float off = b.x - a.x;
        a.x = fmaf(off, part, a.x);
        a.y += b.y + off * off * mine * part;
      }
      counts[thread] += counts[other];
    }
    n = half;
  }
  if (place.row_of_block != 0 || place.vector >= t.vectors) return;
  float2* to = scratch + place.scratch_index<kWidth>(t);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) to[j] = shared[j][thread];
}

/// Adds up `value` over the threads of a column, in a block of kColumns × kWays threads.
__device__ double sum_over_ways(double value) {
  __shared__ double shared[kWays][kColumns];
  __syncthreads();  // the previous result was read
  shared[threadIdx.y][threadIdx.x] = value;
  __syncthreads();
#pragma unroll
  for (int half = kWays / 2; half > 0; half /= 2) {
    if (threadIdx.y < half) {
      shared[threadIdx.y][threadIdx.x] +=
          shared[threadIdx.y + half][threadIdx.x];
    }
    __syncthreads();
  }
  return shared[0][threadIdx.x];
}

/// Adds up `value` over a block of kGroupThreads threads.
__device__ double sum_over_group(double value) {
  __shared__ double shared[kGroupThreads];
  __syncthreads();  // the previous result was read
  const int thread = static_cast<int>(threadIdx.x);
  shared[thread] = value;
  __syncthreads();
#pragma unroll
  for (int half = kGroupThreads / 2; half > 0; half /= 2) {
    if (thread < half) shared[thread] += shared[thread + half];
    __syncthreads();
  }
  return shared[0];
}

/// Outputs of the merged statistics.
struct Statistics {
  float *mean, *inverse_deviation;
  double epsilon;
  RunningMoments running;

  __device__ void write(int i, double average, double squares, double count) const {
    mean[i] = static_cast<float>(average);
    inverse_deviation[i] = static_cast<float>(1 / sqrt(squares / count + epsilon));
    if (running.mean == nullptr) return;
    const double m = running.momentum;
    const double variance = squares / (count > 1 ? count - 1 : 1);
    running.mean[i] = static_cast<float>((1 - m) * running.mean[i] + m * average);
    running.variance[i] =
        static_cast<float>((1 - m) * running.variance[i] + m * variance);
  }
};

/// Merges the parts of each channel (BatchNorm): first their mean, then the squared
/// differences from it.
__global__ void merge_channels_kernel(Tiles t, int channels,
                                      const float2* scratch, Statistics out) {
  const int channel = blockIdx.x * kColumns + threadIdx.x;
  const bool inside = channel < channels;
  double sum = 0;
  if (inside) {
#pragma unroll 4
    for (int i = threadIdx.y; i < t.parts; i += kWays) {
      sum += static_cast<double>(t.rows_of_part(i)) *
             scratch[static_cast<int64_t>(i) * channels + channel].x;
    }
  }
  const double mean = sum_over_ways(sum) / t.rows;
  double squares = 0;
  if (inside) {
#pragma unroll 4
    for (int i = threadIdx.y; i < t.parts; i += kWays) {
      const float2 part = scratch[static_cast<int64_t>(i) * channels + channel];
      const double off = part.x - mean;
      squares += part.y + off * off * t.rows_of_part(i);
    }
  }
  squares = sum_over_ways(squares);
  if (inside && threadIdx.y == 0) out.write(channel, mean, squares, t.rows);
}

/// The same for GroupNorm, one block per statistic.
__global__ void merge_groups_kernel(Tiles t, int channels, int groups,
                                    const float2* scratch, Statistics out) {
  const int each = channels / groups;
  const int64_t first = static_cast<int64_t>(blockIdx.x / groups) * t.parts;
  const float2* from = scratch + first * channels + blockIdx.x % groups * each;
  const int items = t.parts * each;
  double sum = 0;
  for (int i = threadIdx.x; i < items; i += kGroupThreads) {
    sum += static_cast<double>(t.rows_of_part(i / each)) *
           from[static_cast<int64_t>(i / each) * channels + i % each].x;
  }
  const double count = static_cast<double>(t.rows) * each;
  const double mean = sum_over_group(sum) / count;
  double squares = 0;
  for (int i = threadIdx.x; i < items; i += kGroupThreads) {
    const float2 part = from[static_cast<int64_t>(i / each) * channels + i % each];
    const double off = part.x - mean;
    squares += part.y + off * off * t.rows_of_part(i / each);
  }
  squares = sum_over_group(squares);
  if (threadIdx.x == 0) out.write(blockIdx.x, mean, squares, count);
}

/// Gradients of weight and bias from the partial sums of all instances; with BatchNorm
/// the coefficients as well.
__global__ void merge_channel_sums_kernel(Tiles t, int channels, int instances,
                                          NormSums args) {
  const int channel = blockIdx.x * kColumns + threadIdx.x;
  const bool inside = channel < channels;
  const float2* scratch = reinterpret_cast<const float2*>(args.scratch);
  const float* inverse = args.inverse_deviation;
  const int groups = static_cast<int>(args.shape.groups);
  double gradient = 0, product = 0;
  if (inside) {
    const int parts = instances * t.parts;
#pragma unroll 4
    for (int i = threadIdx.y; i < parts; i += kWays) {
      const float2 part = scratch[static_cast<int64_t>(i) * channels + channel];
      const double factor =
          groups == 0 ? 1.0
                      : inverse[i / t.parts * groups + channel / (channels / groups)];
      gradient += part.x;
      product += part.y * factor;
    }
  }
  gradient = sum_over_ways(gradient);
  product = sum_over_ways(product);
  if (!inside || threadIdx.y != 0) return;
  args.dbias[channel] = static_cast<float>(gradient);
  if (inverse == nullptr) return;
  if (groups > 0) {
    args.dweight[channel] = static_cast<float>(product);
    return;
  }
  const double inv = inverse[channel], weight = args.weight[channel];
  args.dweight[channel] = static_cast<float>(product * inv);
  args.coefficients[2 * channel] =
      static_cast<float>(-inv * inv * inv * weight * product / t.rows);
  args.coefficients[2 * channel + 1] =
      static_cast<float>(-inv * weight * gradient / t.rows);
}

/// The coefficients of GroupNorm, one block per statistic.
__global__ void merge_group_sums_kernel(Tiles t, int channels, NormSums args) {
  const int groups = static_cast<int>(args.shape.groups);
  const int each = channels / groups;
  const int channel = blockIdx.x % groups * each;
  const int64_t first = static_cast<int64_t>(blockIdx.x / groups) * t.parts;
  const float2* from =
      reinterpret_cast<const float2*>(args.scratch) + first * channels + channel;
  double gradient = 0, product = 0;
  for (int i = threadIdx.x; i < t.parts * each; i += kGroupThreads) {
    const float2 part = from[static_cast<int64_t>(i / each) * channels + i % each];
    const double weight = args.weight[channel + i % each];
    gradient += weight * part.x;
    product += weight * part.y;
  }
  gradient = sum_over_group(gradient);
  product = sum_over_group(product);
  if (threadIdx.x != 0) return;
  const double inv = args.inverse_deviation[blockIdx.x];
  const double count = static_cast<double>(t.rows) * each;
  args.coefficients[2 * blockIdx.x] =
      static_cast<float>(-inv * inv * inv * product / count);
  args.coefficients[2 * blockIdx.x + 1] =
      static_cast<float>(-inv * gradient / count);
}

}  // namespace

void norm_statistics(const NormStatistics& args, void* stream) {
  const RowsShape& shape = args.shape;
  const auto on = static_cast<cudaStream_t>(stream);
  const Tiles tiles =
      tiles_of(shape, shape.rows_of_instance(), shape.moment_parts());
  const auto blocks =
      static_cast<unsigned>(shape.instances() * tiles.blocks_of_instance());
  float2* scratch = reinterpret_cast<float2*>(args.scratch);
  with_type(shape.type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    moments_kernel<T><<<blocks, kRowThreads, 0, on>>>(
        tiles, static_cast<const uint4*>(args.x), scratch);
  });
  const auto channels = static_cast<int>(shape.channels);
  const Statistics out{args.mean, args.inverse_deviation, args.epsilon,
                       args.running};
  if (shape.groups == 0) {
    merge_channels_kernel<<<(channels + kColumns - 1) / kColumns,
                            dim3(kColumns, kWays), 0, on>>>(tiles, channels,
                                                            scratch, out);
  } else {
    merge_groups_kernel<<<static_cast<unsigned>(shape.statistics()),
                          kGroupThreads, 0, on>>>(
        tiles, channels, static_cast<int>(shape.groups), scratch, out);
  }
  check_launch("norm_statistics");
}

void norm_sums(const NormSums& args, void* stream) {
  const RowsShape& shape = args.shape;
  const auto on = static_cast<cudaStream_t>(stream);
  const Tiles tiles =
      tiles_of(shape, shape.rows_of_instance(), shape.sum_parts());
  const auto channels = static_cast<int>(shape.channels);
  merge_channel_sums_kernel<<<(channels + kColumns - 1) / kColumns,
                              dim3(kColumns, kWays), 0, on>>>(
      tiles, channels, static_cast<int>(shape.instances()), args);
  if (shape.groups > 0) {
    merge_group_sums_kernel<<<static_cast<unsigned>(shape.statistics()),
                              kGroupThreads, 0, on>>>(tiles, channels, args);
  }
  check_launch("norm_sums");
}

}  // namespace reprise::detail::kernels
