#include "load_store.cuh"
#include "stochastic_add.h"
#include "stochastic_round.h"

namespace reprise::detail::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kGroup = 4;  // elements per thread, and per draw of random bits

__device__ uint16_t added(uint16_t sum, float value, uint64_t random, int i) {
  return round_stochastically(
      bits_of(float_of(sum) + value),
      static_cast<uint32_t>(random >> (16 * i)) & 0xffffu);
}

__global__ void __launch_bounds__(kThreads)
    add_kernel(int64_t size, uint16_t* __restrict__ sums,
               const float* __restrict__ values, uint64_t seed) {
  const int64_t group = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t first = group * kGroup;
  if (first >= size) return;
  const uint64_t random = random_bits(seed, static_cast<uint64_t>(group));
  if (first + kGroup > size) {
    for (int i = 0; first + i < size; ++i) {
      sums[first + i] = added(sums[first + i], values[first + i], random, i);
    }
    return;
  }
  const float4 v = reinterpret_cast<const float4*>(values)[group];
  ushort4 s = reinterpret_cast<const ushort4*>(sums)[group];
  s.x = added(s.x, v.x, random, 0);
  s.y = added(s.y, v.y, random, 1);
  s.z = added(s.z, v.z, random, 2);
  s.w = added(s.w, v.w, random, 3);
  reinterpret_cast<ushort4*>(sums)[group] = s;
}

}  // namespace

void stochastic_add(const StochasticAdd& launch, void* stream) {
  const int64_t groups = (launch.size + kGroup - 1) / kGroup;
  const auto blocks = static_cast<unsigned>((groups + kThreads - 1) / kThreads);
  add_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      launch.size, launch.sums, launch.values, launch.seed);
  check_launch("stochastic_add");
}

}  // namespace reprise::detail::kernels
