#pragma once

#include "values.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <string>

/// What the kernels share: values of any type, read and written as single precision, and
/// the end of a sum over many rows.
namespace reprise::kernels {

struct None {};

/// The i-th four values.
inline __device__ float4 load4(const float* from, int64_t i) {
  return reinterpret_cast<const float4*>(from)[i];
}
inline __device__ float4 load4(const __nv_bfloat16* from, int64_t i) {
  const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(from) + 2 * i;
  const float2 a = __bfloat1622float2(pairs[0]), b = __bfloat1622float2(pairs[1]);
  return make_float4(a.x, a.y, b.x, b.y);
}
inline __device__ float4 load4(const __half* from, int64_t i) {
  const auto* pairs = reinterpret_cast<const __half2*>(from) + 2 * i;
  const float2 a = __half22float2(pairs[0]), b = __half22float2(pairs[1]);
  return make_float4(a.x, a.y, b.x, b.y);
}
inline __device__ float4 load4(const None*, int64_t) {
  return make_float4(0, 0, 0, 0);
}
inline __device__ void store4(float* to, int64_t i, float4 v) {
  reinterpret_cast<float4*>(to)[i] = v;
}
inline __device__ void store4(__nv_bfloat16* to, int64_t i, float4 v) {
  auto* pairs = reinterpret_cast<__nv_bfloat162*>(to) + 2 * i;
  pairs[0] = __floats2bfloat162_rn(v.x, v.y);
  pairs[1] = __floats2bfloat162_rn(v.z, v.w);
}
inline __device__ void store4(__half* to, int64_t i, float4 v) {
  auto* pairs = reinterpret_cast<__half2*>(to) + 2 * i;
  pairs[0] = __floats2half2_rn(v.x, v.y);
  pairs[1] = __floats2half2_rn(v.z, v.w);
}

inline __device__ float load1(const float* from, int64_t i) {
  return from[i];
}
inline __device__ float load1(const __nv_bfloat16* from, int64_t i) {
  return __bfloat162float(from[i]);
}
inline __device__ float load1(const __half* from, int64_t i) {
  return __half2float(from[i]);
}

/// Eight values of half precision, as one access of memory has them.
template <class T>
struct Eight {
  uint4 bits;

  __device__ float2 pair(int i) const;
  __device__ void set_pair(int i, float2 v);

 private:
  __device__ unsigned word(int i) const {
    return i == 0 ? bits.x : i == 1 ? bits.y : i == 2 ? bits.z : bits.w;
  }
  __device__ unsigned& word(int i) {
    return i == 0 ? bits.x : i == 1 ? bits.y : i == 2 ? bits.z : bits.w;
  }
};
template <>
inline __device__ float2 Eight<__nv_bfloat16>::pair(int i) const {
  const unsigned bits = word(i);
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(bits));
}
template <>
inline __device__ float2 Eight<__half>::pair(int i) const {
  const unsigned bits = word(i);
  return __half22float2(reinterpret_cast<const __half2&>(bits));
}
template <>
inline __device__ void Eight<__nv_bfloat16>::set_pair(int i, float2 v) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(v.x, v.y);
  word(i) = reinterpret_cast<const unsigned&>(two);
}
template <>
inline __device__ void Eight<__half>::set_pair(int i, float2 v) {
  const __half2 two = __floats2half2_rn(v.x, v.y);
  word(i) = reinterpret_cast<const unsigned&>(two);
}

/// Calls `use` with a null pointer of the type, for half precision.
template <class F>
void with_half(Values values, F&& use) {
  if (values == Values::kBfloat16) return use(static_cast<__nv_bfloat16*>(nullptr));
  use(static_cast<__half*>(nullptr));
}
/// For any type but none.
template <class F>
void with_values(Values values, F&& use) {
  if (values == Values::kSingle) return use(static_cast<float*>(nullptr));
  with_half(values, use);
}

/// The sum over the parts of a column that lies at `from`, `stride` values from part to
/// part: each kWays-th by one thread of a block of 32 columns x kWays threads, which all of
/// the block has to call. Whole in the threads whose y is 0.
template <int kWays>
__device__ float sum_of_parts(int parts, int64_t stride, const float* from,
                              bool inside) {
  __shared__ float shared[kWays][32];
  float total = 0;
  if (inside) {
#pragma unroll 4
    for (int i = threadIdx.y; i < parts; i += kWays) total += from[i * stride];
  }
  shared[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y != 0) return 0;
  for (int i = 1; i < kWays; ++i) total += shared[i][threadIdx.x];
  return total;
}

inline void check_launch(const char* name) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error("[" + std::string(name) +
                             "] a kernel: " + cudaGetErrorString(error));
  }
}

}  // namespace reprise::kernels
