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

/// Elements 4 i to 4 i + 3, in one memory access.
inline __device__ float4 load4(const float* from, int64_t i) {
  return reinterpret_cast<const float4*>(from)[i];
}
inline __device__ float4 load4(const __nv_bfloat16* from, int64_t i) {
  const uint2 bits = reinterpret_cast<const uint2*>(from)[i];
  const float2 a = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(bits.x));
  const float2 b = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(bits.y));
  return make_float4(a.x, a.y, b.x, b.y);
}
inline __device__ float4 load4(const __half* from, int64_t i) {
  const uint2 bits = reinterpret_cast<const uint2*>(from)[i];
  const float2 a = __half22float2(reinterpret_cast<const __half2&>(bits.x));
  const float2 b = __half22float2(reinterpret_cast<const __half2&>(bits.y));
  return make_float4(a.x, a.y, b.x, b.y);
}
inline __device__ void store4(float* to, int64_t i, float4 v) {
  reinterpret_cast<float4*>(to)[i] = v;
}
inline __device__ void store4(__nv_bfloat16* to, int64_t i, float4 v) {
  const __nv_bfloat162 a = __floats2bfloat162_rn(v.x, v.y);
  const __nv_bfloat162 b = __floats2bfloat162_rn(v.z, v.w);
  reinterpret_cast<uint2*>(to)[i] = make_uint2(
      reinterpret_cast<const unsigned&>(a), reinterpret_cast<const unsigned&>(b));
}
inline __device__ void store4(__half* to, int64_t i, float4 v) {
  const __half2 a = __floats2half2_rn(v.x, v.y), b = __floats2half2_rn(v.z, v.w);
  reinterpret_cast<uint2*>(to)[i] = make_uint2(
      reinterpret_cast<const unsigned&>(a), reinterpret_cast<const unsigned&>(b));
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

/// The elements of one memory access of 16 bytes as floats.
template <class T>
struct Pack {
  static constexpr int kSize = 8;
  float v[kSize];

  __device__ void load(const T* from) {
    unpack(*reinterpret_cast<const uint4*>(from));
  }
  __device__ void unpack(uint4 bits) {
    const Eight<T> eight{bits};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 two = eight.pair(j);
      v[2 * j] = two.x;
      v[2 * j + 1] = two.y;
    }
  }
  __device__ void store(T* to) const {
    Eight<T> eight;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      eight.set_pair(j, make_float2(v[2 * j], v[2 * j + 1]));
    }
    *reinterpret_cast<Eight<T>*>(to) = eight;
  }
};
template <>
struct Pack<float> {
  static constexpr int kSize = 4;
  float v[kSize];

  __device__ void load(const float* from) {
    unpack(*reinterpret_cast<const uint4*>(from));
  }
  __device__ void unpack(uint4 bits) {
    v[0] = __uint_as_float(bits.x);
    v[1] = __uint_as_float(bits.y);
    v[2] = __uint_as_float(bits.z);
    v[3] = __uint_as_float(bits.w);
  }
  __device__ void store(float* to) const {
    *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
  }
};

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
#pragma unroll 8
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
