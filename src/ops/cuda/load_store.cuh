#pragma once

#include "dtype.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <string>

/// Shared by the kernels: loads and stores that convert between float32 and the element
/// type, dispatch on the element type, and the last step of a reduction over many rows.
/// Tested by tests/ops/add_norm_test.cpp.
namespace reprise::detail::kernels {

/// Element type of a tensor that is absent.
struct None {};

/// Elements 4 i to 4 i + 3.
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

/// Eight elements of half precision: 16 bytes, one memory access.
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

/// Calls `use` with a null pointer to the element type, float16 or bfloat16.
template <class F>
void with_half(DType type, F&& use) {
  if (type == DType::kBFloat16) return use(static_cast<__nv_bfloat16*>(nullptr));
  use(static_cast<__half*>(nullptr));
}
/// The same for float32, float16 and bfloat16.
template <class F>
void with_type(DType type, F&& use) {
  if (type == DType::kFloat32) return use(static_cast<float*>(nullptr));
  with_half(type, use);
}

/// Adds up the `parts` values of one column, the first at `from`, `stride` elements apart.
/// Blocks have 32 × kWays threads: thread (x, y) adds every kWays-th value of column x,
/// from the y-th on. All threads of the block must call this; those with y = 0 return the
/// sum.
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

/// Throws std::runtime_error if the last launch failed.
inline void check_launch(const char* name) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error("[" + std::string(name) +
                             "] kernel launch failed: " + cudaGetErrorString(error));
  }
}

}  // namespace reprise::detail::kernels
