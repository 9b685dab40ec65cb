#include "adam.h"
#include "load_store.cuh"
#include "split_bits.cuh"

#include <type_traits>

namespace reprise::detail::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kFoursPerThread = 2;
constexpr int kPerBlock = 4 * kFoursPerThread * kThreads;  // elements

/// Tensors of a launch, with the first block of each.
struct Table {
  AdamUpdate update;
  int first[AdamUpdate::kMaxTensors + 1];
};

struct Settings {
  float beta1, beta2, rest1, rest2, epsilon, keep, decay, rate, inverse_root;
};

__device__ void update1(const Settings& s, float& p, float g, float& m,
                        float& v) {
  g += s.decay * p;
  m = s.beta1 * m + s.rest1 * g;
  v = s.beta2 * v + s.rest2 * g * g;
  const float divisor = sqrtf(v) * s.inverse_root + s.epsilon;
  p = p * s.keep - s.rate * m / divisor;
}

/// The tensor that `block` belongs to: the last one whose first block is not after it.
__device__ int find_tensor(const Table& table, int block) {
  int low = 0, high = table.update.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (table.first[middle] <= block ? low : high) = middle;
  }
  return low;
}

/// Addresses of four values of a split matrix: their upper and their lower halves.
struct SplitFour {
  uint2 *upper, *lower;

  __device__ SplitFour(float* matrix, unsigned row_fours, int64_t four) {
    const unsigned row = static_cast<unsigned>(four) / row_fours;
    const unsigned column = static_cast<unsigned>(four) - row * row_fours;
    upper = reinterpret_cast<uint2*>(matrix) + 2 * int64_t{row} * row_fours +
            column;
    lower = upper + row_fours;
  }
};

__device__ float4 load_parameter(const AdamTensor& tensor, int64_t i) {
  if (tensor.split_fours == 0) return load4(tensor.parameter, i);
  const SplitFour at(tensor.parameter, tensor.split_fours, i);
  const uint2 upper = *at.upper, lower = *at.lower;
  uint4 bits;
  merge_two(upper.x, lower.x, bits.x, bits.y);
  merge_two(upper.y, lower.y, bits.z, bits.w);
  return make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y),
                     __uint_as_float(bits.z), __uint_as_float(bits.w));
}

__device__ void store_parameter(const AdamTensor& tensor, int64_t i,
                                const float4& value) {
  if (tensor.split_fours == 0) {
    store4(tensor.parameter, i, value);
    return;
  }
  const SplitFour at(tensor.parameter, tensor.split_fours, i);
  uint2 upper, lower;
  split_two(__float_as_uint(value.x), __float_as_uint(value.y), upper.x,
            lower.x);
  split_two(__float_as_uint(value.z), __float_as_uint(value.w), upper.y,
            lower.y);
  *at.upper = upper;
  *at.lower = lower;
}

template <class Copy>
__global__ void __launch_bounds__(kThreads)
    update_kernel(const __grid_constant__ Table table) {
  const int index = find_tensor(table, blockIdx.x);
  const AdamTensor& tensor = table.update.tensors[index];
  const AdamUpdate& all = table.update;
  const float* values = tensor.step_values;
  const float rate = values != nullptr ? values[0] : tensor.rate;
  const float root = values != nullptr ? values[1] : tensor.root;
  const float keep = values != nullptr ? values[2] : all.keep;
  const Settings s = {all.beta1, all.beta2, all.rest1, all.rest2, all.epsilon,
                      keep,      all.decay, rate,      1 / root};
  auto* copy = static_cast<Copy*>(tensor.copy);
  const int64_t first =
      static_cast<int64_t>(blockIdx.x - table.first[index]) * kPerBlock;
  const int64_t fours = tensor.size / 4;
  // All loads first, so that they are in flight together.
  float4 p[kFoursPerThread], g[kFoursPerThread], m[kFoursPerThread],
      v[kFoursPerThread];
#pragma unroll
  for (int k = 0; k < kFoursPerThread; ++k) {
    const int64_t i = first / 4 + k * kThreads + threadIdx.x;
    if (i >= fours) continue;
    p[k] = load_parameter(tensor, i);
    g[k] = load4(tensor.gradient, i);
    m[k] = load4(tensor.mean, i);
    v[k] = load4(tensor.square, i);
  }
#pragma unroll
  for (int k = 0; k < kFoursPerThread; ++k) {
    const int64_t i = first / 4 + k * kThreads + threadIdx.x;
    if (i >= fours) continue;
    update1(s, p[k].x, g[k].x, m[k].x, v[k].x);
    update1(s, p[k].y, g[k].y, m[k].y, v[k].y);
    update1(s, p[k].z, g[k].z, m[k].z, v[k].z);
    update1(s, p[k].w, g[k].w, m[k].w, v[k].w);
    store_parameter(tensor, i, p[k]);
    store4(tensor.mean, i, m[k]);
    store4(tensor.square, i, v[k]);
    if (copy != nullptr) store4(copy, i, p[k]);
  }
  // The last 1 to 3 elements, by the first threads of the tensor.
  const int64_t rest = 4 * fours + threadIdx.x;
  if (first == 0 && rest < tensor.size) {
    float value = tensor.parameter[rest], mean = tensor.mean[rest],
          square = tensor.square[rest];
    update1(s, value, tensor.gradient[rest], mean, square);
    tensor.parameter[rest] = value;
    tensor.mean[rest] = mean;
    tensor.square[rest] = square;
    if (copy != nullptr) copy[rest] = static_cast<Copy>(value);
  }
}

}  // namespace

void adam_update(const AdamUpdate& args, void* stream) {
  Table table;
  table.update = args;
  int blocks = 0;
  for (int i = 0; i < args.count; ++i) {
    table.first[i] = blocks;
    const int64_t own = (args.tensors[i].size + kPerBlock - 1) / kPerBlock;
    blocks += static_cast<int>(own > 0 ? own : 1);
  }
  if (blocks == 0) return;
  with_half(args.copy_type, [&](auto* type) {
    using Copy = std::remove_pointer_t<decltype(type)>;
    update_kernel<Copy><<<blocks, kThreads, 0,
                          static_cast<cudaStream_t>(stream)>>>(table);
  });
  check_launch("adam_update");
}

}  // namespace reprise::detail::kernels
