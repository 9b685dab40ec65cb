#include "load_store.cuh"
#include "swiglu.h"

#include <type_traits>

namespace reprise::detail::kernels {
namespace {

constexpr int kThreads = 256;

/// 1 / (1 + exp(-x)). The approximations have a relative error of about 2⁻²¹, far less than
/// the rounding of half precision.
template <class T>
__device__ float sigmoid(float x) {
  if constexpr (sizeof(T) == 2) {
    return __fdividef(1.f, 1.f + __expf(-x));
  } else {
    return 1.f / (1.f + expf(-x));
  }
}

/// Row and column of this thread's elements. `packs`: accesses of 16 bytes per row.
struct Place {
  int64_t row;
  int column;
  bool inside;
};
template <class T>
__device__ Place place_of(int64_t rows, unsigned packs) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = i / packs;
  return {row, static_cast<int>(i - row * packs) * Pack<T>::kSize, row < rows};
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(SwigluShape shape, const T* gate, const T* up, T* result) {
  const auto packs = static_cast<unsigned>(shape.columns / Pack<T>::kSize);
  const Place place = place_of<T>(shape.rows, packs);
  if (!place.inside) return;
  Pack<T> g, u;
  g.load(gate + place.row * shape.gate_stride + place.column);
  u.load(up + place.row * shape.up_stride + place.column);
#pragma unroll
  for (int j = 0; j < Pack<T>::kSize; ++j) {
    g.v[j] = g.v[j] * sigmoid<T>(g.v[j]) * u.v[j];
  }
  g.store(result + place.row * shape.columns + place.column);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(SwigluShape shape, const T* gate, const T* up,
                    const T* dresult, int64_t stride, T* dgate, T* dup) {
  const auto packs = static_cast<unsigned>(shape.columns / Pack<T>::kSize);
  const Place place = place_of<T>(shape.rows, packs);
  if (!place.inside) return;
  Pack<T> g, u, d;
  g.load(gate + place.row * shape.gate_stride + place.column);
  u.load(up + place.row * shape.up_stride + place.column);
  d.load(dresult + place.row * shape.columns + place.column);
#pragma unroll
  for (int j = 0; j < Pack<T>::kSize; ++j) {
    const float s = sigmoid<T>(g.v[j]);
    const float silu = g.v[j] * s;
    // silu'(g) = s + g s (1 - s)
    g.v[j] = d.v[j] * u.v[j] * (s + silu * (1.f - s));
    u.v[j] = d.v[j] * silu;
  }
  const int64_t to = place.row * stride + place.column;
  if (dgate != nullptr) g.store(dgate + to);
  if (dup != nullptr) u.store(dup + to);
}

/// Blocks of kThreads threads with one pack each.
template <class T>
unsigned blocks_for(const SwigluShape& shape) {
  const int64_t packs = shape.rows * (shape.columns / Pack<T>::kSize);
  return static_cast<unsigned>((packs + kThreads - 1) / kThreads);
}

}  // namespace

void swiglu_forward(const SwigluForward& args, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  with_type(args.shape.type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    forward_kernel<T><<<blocks_for<T>(args.shape), kThreads, 0, on>>>(
        args.shape, static_cast<const T*>(args.gate),
        static_cast<const T*>(args.up), static_cast<T*>(args.result));
  });
  check_launch("swiglu_forward");
}

void swiglu_backward(const SwigluBackward& args, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  with_type(args.shape.type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    backward_kernel<T><<<blocks_for<T>(args.shape), kThreads, 0, on>>>(
        args.shape, static_cast<const T*>(args.gate),
        static_cast<const T*>(args.up), static_cast<const T*>(args.dresult),
        args.gradient_stride, static_cast<T*>(args.dgate),
        static_cast<T*>(args.dup));
  });
  check_launch("swiglu_backward");
}

}  // namespace reprise::detail::kernels
