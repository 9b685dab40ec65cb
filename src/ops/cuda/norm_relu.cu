#include "norm_relu.h"
#include "load_store.cuh"

#include <algorithm>

namespace reprise::detail::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kPart = NormReluShape::kPartSize;

int64_t ceil_divide(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

/// NormReluShape as the kernels use it.
struct Sizes {
  int samples, channels, height, width;
  int groups, parts;
  long long plane;

  __device__ int statistic_of(long long plane_index) const {
    const int c = static_cast<int>(plane_index % channels);
    if (groups == 0) return c;
    const int n = static_cast<int>(plane_index / channels);
    return n * groups + c / (channels / groups);
  }
};

/// The norm of one channel as x · scale + shift.
struct Line {
  float scale, shift;
  __device__ float at(float x) const { return fmaf(x, scale, shift); }
};

__device__ Line line_of(const NormTensors& t, int statistic, int channel) {
  const float scale = t.weight[channel] * t.inverse_deviation[statistic];
  return {scale, t.bias[channel] - t.mean[statistic] * scale};
}

/// Sums of two values over the block.
__device__ void sum_over_block(float& a, float& b) {
  __shared__ float shared_a[kThreads], shared_b[kThreads];
  const int i = threadIdx.x;
  shared_a[i] = a;
  shared_b[i] = b;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (i < half) {
      shared_a[i] += shared_a[i + half];
      shared_b[i] += shared_b[i + half];
    }
    __syncthreads();
  }
  a = shared_a[0];
  b = shared_b[0];
}

__device__ long long part_begin(const Sizes& s, int part) {
  return part * static_cast<long long>(kPart);
}
__device__ long long part_end(const Sizes& s, int part) {
  const long long end = (part + 1) * static_cast<long long>(kPart);
  return end < s.plane ? end : s.plane;
}

/// One block per part of a plane: the mean, and the sum of squared differences from it.
/// Computed relative to the first value of the part, since the sum of squares of values
/// with a large mean would cancel.
__global__ void moments_kernel(Sizes s, const float* x, float* scratch) {
  const long long p = blockIdx.x / s.parts;
  const int part = blockIdx.x % s.parts;
  const long long begin = part_begin(s, part), end = part_end(s, part);
  const float* plane = x + p * s.plane;
  const float origin = plane[begin];
  float sum = 0, squares = 0;
  if (s.plane % 4 == 0) {
    const float4* four = reinterpret_cast<const float4*>(plane);
    for (long long i = begin / 4 + threadIdx.x; i < end / 4; i += kThreads) {
      const float4 v = four[i];
      const float a = v.x - origin, b = v.y - origin, c = v.z - origin,
                  d = v.w - origin;
      sum += (a + b) + (c + d);
      squares += (a * a + b * b) + (c * c + d * d);
    }
  } else {
    for (long long i = begin + threadIdx.x; i < end; i += kThreads) {
      const float d = plane[i] - origin;
      sum += d;
      squares += d * d;
    }
  }
  sum_over_block(sum, squares);
  if (threadIdx.x == 0) {
    const float count = static_cast<float>(end - begin);
    const float off = sum / count;
    scratch[2 * blockIdx.x] = origin + off;
    scratch[2 * blockIdx.x + 1] = squares - sum * off;
  }
}

/// Index in the scratch memory of the i-th part of a statistic.
__device__ long long part_of_statistic(const Sizes& s, int statistic,
                                       long long i) {
  const long long which = i / s.parts, part = i % s.parts;
  if (s.groups == 0) return (which * s.channels + statistic) * s.parts + part;
  const int each = s.channels / s.groups;
  const int n = statistic / s.groups, group = statistic % s.groups;
  const long long p =
      static_cast<long long>(n) * s.channels + group * each + which;
  return p * s.parts + part;
}
__device__ long long parts_of_statistic(const Sizes& s) {
  const long long planes = s.groups == 0 ? s.samples : s.channels / s.groups;
  return planes * s.parts;
}

/// One block per statistic: merges its parts (Chan et al. 1983) and updates the running
/// statistics.
__global__ void merge_kernel(Sizes s, const float* scratch, float* mean,
                             float* inverse_deviation, double epsilon,
                             RunningMoments running) {
  __shared__ double counts[kThreads], means[kThreads], squares[kThreads];
  const int statistic = blockIdx.x;
  const long long parts = parts_of_statistic(s);
  double count = 0, average = 0, square = 0;
  for (long long i = threadIdx.x; i < parts; i += kThreads) {
    const int part = static_cast<int>(i % s.parts);
    const double n =
        static_cast<double>(part_end(s, part) - part_begin(s, part));
    const long long at = part_of_statistic(s, statistic, i);
    const double off = scratch[2 * at] - average;
    const double all = count + n;
    average += off * n / all;
    square += scratch[2 * at + 1] + off * off * count * n / all;
    count = all;
  }
  const int k = threadIdx.x;
  counts[k] = count;
  means[k] = average;
  squares[k] = square;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (k < half && counts[k + half] > 0) {
      const double n = counts[k + half], all = counts[k] + n;
      const double off = means[k + half] - means[k];
      means[k] += off * n / all;
      squares[k] += squares[k + half] + off * off * counts[k] * n / all;
      counts[k] = all;
    }
    __syncthreads();
  }
  if (k != 0) return;
  const double variance = squares[0] / counts[0];
  mean[statistic] = static_cast<float>(means[0]);
  inverse_deviation[statistic] =
      static_cast<float>(1 / sqrt(variance + epsilon));
  if (running.mean == nullptr) return;
  const double unbiased = squares[0] / (counts[0] > 1 ? counts[0] - 1 : 1);
  const double m = running.momentum;
  running.mean[statistic] =
      static_cast<float>((1 - m) * running.mean[statistic] + m * means[0]);
  running.variance[statistic] =
      static_cast<float>((1 - m) * running.variance[statistic] + m * unbiased);
}

/// ReLU that propagates NaN.
__device__ float through(float value) {
  return value > 0 ? value : (value != value ? value : 0);
}

__global__ void apply_kernel(Sizes s, NormTensors t, float* y) {
  const long long p = blockIdx.x / s.parts;
  const int part = blockIdx.x % s.parts;
  const long long begin = part_begin(s, part), end = part_end(s, part);
  const Line line =
      line_of(t, s.statistic_of(p), static_cast<int>(p % s.channels));
  const float* from = t.x + p * s.plane;
  float* to = y + p * s.plane;
  if (s.plane % 4 == 0) {
    for (long long i = begin / 4 + threadIdx.x; i < end / 4; i += kThreads) {
      float4 v = reinterpret_cast<const float4*>(from)[i];
      v.x = through(line.at(v.x));
      v.y = through(line.at(v.y));
      v.z = through(line.at(v.z));
      v.w = through(line.at(v.w));
      reinterpret_cast<float4*>(to)[i] = v;
    }
    return;
  }
  for (long long i = begin + threadIdx.x; i < end; i += kThreads) {
    to[i] = through(line.at(from[i]));
  }
}

/// Parts are parts of the pooled plane here.
__global__ void apply_pool_kernel(Sizes s, NormTensors t, int parts, float* y,
                                  uint8_t* positions) {
  const long long p = blockIdx.x / parts;
  const long long first = (blockIdx.x % parts) * (kPart / 4);
  const int height = s.height / 2, width = s.width / 2;
  const long long pooled = static_cast<long long>(height) * width;
  const long long last =
      first + kPart / 4 < pooled ? first + kPart / 4 : pooled;
  const Line line =
      line_of(t, s.statistic_of(p), static_cast<int>(p % s.channels));
  const float* plane = t.x + p * s.plane;
  for (long long i = first + threadIdx.x; i < last; i += kThreads) {
    const int h = static_cast<int>(i / width), w = static_cast<int>(i % width);
    const float* window = plane + static_cast<long long>(2 * h) * s.width + 2 * w;
    const float v[4] = {line.at(window[0]), line.at(window[1]),
                        line.at(window[s.width]), line.at(window[s.width + 1])};
    int best = 0;
    for (int k = 1; k < 4; ++k) {
      if (v[k] > v[best] || v[k] != v[k]) best = k;
    }
    const bool passes = v[best] > 0 || v[best] != v[best];
    y[p * pooled + i] = passes ? v[best] : 0;
    positions[p * pooled + i] = static_cast<uint8_t>(passes ? best : 4);
  }
}

/// One block per part of a plane: the sums of the gradient that passes the ReLU, and of its
/// product with the normalized value.
__global__ void sums_kernel(Sizes s, NormTensors t, const float* dy,
                            float* scratch) {
  const long long p = blockIdx.x / s.parts;
  const int part = blockIdx.x % s.parts;
  const long long begin = part_begin(s, part), end = part_end(s, part);
  const int statistic = s.statistic_of(p);
  const Line line = line_of(t, statistic, static_cast<int>(p % s.channels));
  const float mean = t.mean[statistic], inverse = t.inverse_deviation[statistic];
  const float* x = t.x + p * s.plane;
  const float* gradient = dy + p * s.plane;
  float sum = 0, product = 0;
  const auto take = [&](float value, float g) {
    if (!(line.at(value) > 0)) return;
    sum += g;
    product = fmaf(g, (value - mean) * inverse, product);
  };
  if (s.plane % 4 == 0) {
    for (long long i = begin / 4 + threadIdx.x; i < end / 4; i += kThreads) {
      const float4 v = reinterpret_cast<const float4*>(x)[i];
      const float4 g = reinterpret_cast<const float4*>(gradient)[i];
      take(v.x, g.x);
      take(v.y, g.y);
      take(v.z, g.z);
      take(v.w, g.w);
    }
  } else {
    for (long long i = begin + threadIdx.x; i < end; i += kThreads) {
      take(x[i], gradient[i]);
    }
  }
  sum_over_block(sum, product);
  if (threadIdx.x == 0) {
    scratch[2 * blockIdx.x] = sum;
    scratch[2 * blockIdx.x + 1] = product;
  }
}

__global__ void pool_sums_kernel(Sizes s, NormTensors t, const float* dy,
                                 const uint8_t* positions, float* scratch) {
  const long long p = blockIdx.x / s.parts;
  const int part = blockIdx.x % s.parts;
  const int height = s.height / 2, width = s.width / 2;
  const long long pooled = static_cast<long long>(height) * width;
  // The pooled plane has as many parts as the plane.
  const long long each = (pooled + s.parts - 1) / s.parts;
  const long long begin = part * each;
  const long long end = begin + each < pooled ? begin + each : pooled;
  const int statistic = s.statistic_of(p);
  const float mean = t.mean[statistic], inverse = t.inverse_deviation[statistic];
  const float* plane = t.x + p * s.plane;
  float sum = 0, product = 0;
  for (long long i = begin + threadIdx.x; i < end; i += kThreads) {
    const int place = positions[p * pooled + i];
    if (place > 3) continue;
    const int h = static_cast<int>(i / width), w = static_cast<int>(i % width);
    const float value = plane[static_cast<long long>(2 * h + place / 2) * s.width +
                              2 * w + place % 2];
    const float g = dy[p * pooled + i];
    sum += g;
    product = fmaf(g, (value - mean) * inverse, product);
  }
  sum_over_block(sum, product);
  if (threadIdx.x == 0) {
    scratch[2 * blockIdx.x] = sum;
    scratch[2 * blockIdx.x + 1] = product;
  }
}

/// First one block per statistic: the two means, weighted by channel, that are subtracted
/// in the gradient of x. Then one block per channel: the gradients of weight and bias.
__global__ void merge_sums_kernel(Sizes s, const float* weight,
                                  const float* scratch, float* sums,
                                  float* dweight, float* dbias) {
  __shared__ double first[kThreads], second[kThreads];
  const int statistics = s.groups == 0 ? s.channels : s.samples * s.groups;
  const bool of_statistic = static_cast<int>(blockIdx.x) < statistics;
  const int index =
      static_cast<int>(blockIdx.x) - (of_statistic ? 0 : statistics);
  const long long count = of_statistic
                              ? parts_of_statistic(s)
                              : static_cast<long long>(s.samples) * s.parts;
  double a = 0, b = 0;
  for (long long i = threadIdx.x; i < count; i += kThreads) {
    const long long at =
        of_statistic
            ? part_of_statistic(s, index, i)
            : (i / s.parts * s.channels + index) * s.parts + i % s.parts;
    const double factor =
        of_statistic ? weight[at / s.parts % s.channels] : 1.0;
    a += factor * scratch[2 * at];
    b += factor * scratch[2 * at + 1];
  }
  const int k = threadIdx.x;
  first[k] = a;
  second[k] = b;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (k < half) {
      first[k] += first[k + half];
      second[k] += second[k + half];
    }
    __syncthreads();
  }
  if (k != 0) return;
  if (of_statistic) {
    const double values = static_cast<double>(s.plane) * s.samples *
                          s.channels / statistics;
    sums[2 * index] = static_cast<float>(first[0] / values);
    sums[2 * index + 1] = static_cast<float>(second[0] / values);
  } else {
    dbias[index] = static_cast<float>(first[0]);
    dweight[index] = static_cast<float>(second[0]);
  }
}

/// The gradient of an element of x, from x and the gradient g of the norm's output.
struct Slope {
  float weight, inverse, mean, lost, tilt;
  __device__ float at(float x, float g) const {
    return inverse * (weight * g - lost - (x - mean) * inverse * tilt);
  }
};
__device__ Slope slope_of(const NormTensors& t, const float* sums,
                          int statistic, int channel) {
  return {t.weight[channel], t.inverse_deviation[statistic], t.mean[statistic],
          sums[2 * statistic], sums[2 * statistic + 1]};
}

__global__ void slope_kernel(Sizes s, NormTensors t, const float* dy,
                             const float* sums, float* dx) {
  const long long p = blockIdx.x / s.parts;
  const int part = blockIdx.x % s.parts;
  const long long begin = part_begin(s, part), end = part_end(s, part);
  const int statistic = s.statistic_of(p);
  const int channel = static_cast<int>(p % s.channels);
  const Line line = line_of(t, statistic, channel);
  const Slope slope = slope_of(t, sums, statistic, channel);
  const float* x = t.x + p * s.plane;
  const float* gradient = dy + p * s.plane;
  float* to = dx + p * s.plane;
  const auto one = [&](float value, float g) {
    const bool passes = line.at(value) > 0;
    return slope.at(value, passes ? g : 0);
  };
  if (s.plane % 4 == 0) {
    for (long long i = begin / 4 + threadIdx.x; i < end / 4; i += kThreads) {
      float4 v = reinterpret_cast<const float4*>(x)[i];
      const float4 g = reinterpret_cast<const float4*>(gradient)[i];
      v.x = one(v.x, g.x);
      v.y = one(v.y, g.y);
      v.z = one(v.z, g.z);
      v.w = one(v.w, g.w);
      reinterpret_cast<float4*>(to)[i] = v;
    }
    return;
  }
  for (long long i = begin + threadIdx.x; i < end; i += kThreads) {
    to[i] = one(x[i], gradient[i]);
  }
}

/// One thread per window; windows at the edges may be incomplete.
__global__ void pool_slope_kernel(Sizes s, NormTensors t, int parts,
                                  const float* dy, const uint8_t* positions,
                                  const float* sums, float* dx) {
  const long long p = blockIdx.x / parts;
  const int height = (s.height + 1) / 2, width = (s.width + 1) / 2;
  const long long windows = static_cast<long long>(height) * width;
  const long long first = (blockIdx.x % parts) * (kPart / 4);
  const long long last =
      first + kPart / 4 < windows ? first + kPart / 4 : windows;
  const int statistic = s.statistic_of(p);
  const Slope slope =
      slope_of(t, sums, statistic, static_cast<int>(p % s.channels));
  const int pooled_height = s.height / 2, pooled_width = s.width / 2;
  const long long pooled = static_cast<long long>(pooled_height) * pooled_width;
  for (long long i = first + threadIdx.x; i < last; i += kThreads) {
    const int h = static_cast<int>(i / width), w = static_cast<int>(i % width);
    int place = 4;
    float g = 0;
    if (h < pooled_height && w < pooled_width) {
      const long long at =
          p * pooled + static_cast<long long>(h) * pooled_width + w;
      place = positions[at];
      g = dy[at];
    }
    for (int k = 0; k < 4; ++k) {
      const int row = 2 * h + k / 2, column = 2 * w + k % 2;
      if (row >= s.height || column >= s.width) continue;
      const long long at =
          p * s.plane + static_cast<long long>(row) * s.width + column;
      dx[at] = slope.at(t.x[at], k == place ? g : 0);
    }
  }
}

Sizes sizes_of(const NormReluShape& shape) {
  return {static_cast<int>(shape.samples), static_cast<int>(shape.channels),
          static_cast<int>(shape.height),  static_cast<int>(shape.width),
          static_cast<int>(shape.groups),  static_cast<int>(shape.parts()),
          shape.plane_size()};
}

}  // namespace

void norm_relu_forward(const NormReluForward& args, void* stream) {
  const NormReluShape& shape = args.shape;
  const NormTensors& tensors = args.tensors;
  const auto on = static_cast<cudaStream_t>(stream);
  const Sizes sizes = sizes_of(shape);
  const auto blocks = static_cast<unsigned>(shape.planes() * shape.parts());
  moments_kernel<<<blocks, kThreads, 0, on>>>(sizes, tensors.x, args.scratch);
  merge_kernel<<<static_cast<unsigned>(shape.statistics()), kThreads, 0, on>>>(
      sizes, args.scratch, tensors.mean, tensors.inverse_deviation,
      args.epsilon, args.running);
  if (shape.pool) {
    const int64_t pooled = shape.pooled_height() * shape.pooled_width();
    const int64_t parts = std::max<int64_t>(1, ceil_divide(pooled, kPart / 4));
    apply_pool_kernel<<<static_cast<unsigned>(shape.planes() * parts), kThreads,
                        0, on>>>(sizes, tensors, static_cast<int>(parts),
                                 args.y, args.positions);
  } else {
    apply_kernel<<<blocks, kThreads, 0, on>>>(sizes, tensors, args.y);
  }
  check_launch("norm_relu_forward");
}

void norm_relu_backward(const NormReluBackward& args, void* stream) {
  const NormReluShape& shape = args.shape;
  const NormTensors& tensors = args.tensors;
  const auto on = static_cast<cudaStream_t>(stream);
  const Sizes sizes = sizes_of(shape);
  const auto blocks = static_cast<unsigned>(shape.planes() * shape.parts());
  if (shape.pool) {
    pool_sums_kernel<<<blocks, kThreads, 0, on>>>(
        sizes, tensors, args.dy, args.positions, args.scratch);
  } else {
    sums_kernel<<<blocks, kThreads, 0, on>>>(sizes, tensors, args.dy,
                                             args.scratch);
  }
  merge_sums_kernel<<<static_cast<unsigned>(shape.statistics() +
                                            shape.channels),
                      kThreads, 0, on>>>(sizes, tensors.weight, args.scratch,
                                         args.sums, args.dweight, args.dbias);
  if (args.dx == nullptr) return check_launch("norm_relu_backward");
  if (shape.pool) {
    const int64_t windows =
        ((shape.height + 1) / 2) * ((shape.width + 1) / 2);
    const int64_t parts = ceil_divide(windows, kPart / 4);
    pool_slope_kernel<<<static_cast<unsigned>(shape.planes() * parts), kThreads,
                        0, on>>>(sizes, tensors, static_cast<int>(parts),
                                 args.dy, args.positions, args.sums, args.dx);
  } else {
    slope_kernel<<<blocks, kThreads, 0, on>>>(sizes, tensors, args.dy,
                                              args.sums, args.dx);
  }
  check_launch("norm_relu_backward");
}

}  // namespace reprise::detail::kernels
