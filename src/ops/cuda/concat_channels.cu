#include "concat_channels.h"
#include "load_store.cuh"

#include <type_traits>

namespace reprise::detail::kernels {
namespace {

constexpr int kThreads = 256;
// Accesses of 16 bytes per thread.
constexpr int kAccesses = 4;

/// Widths in accesses of 16 bytes.
struct Widths {
  unsigned a, b;
  unsigned total;  // accesses of all rows
  __device__ unsigned both() const { return a + b; }
};

/// Calls `use(i, row, column)` for the accesses of this thread.
template <class F>
__device__ void for_each(const Widths& widths, F&& use) {
  const unsigned first = blockIdx.x * (kThreads * kAccesses) + threadIdx.x;
#pragma unroll
  for (int k = 0; k < kAccesses; ++k) {
    const unsigned i = first + k * kThreads;
    if (i >= widths.total) return;
    const unsigned row = i / widths.both();
    use(i, row, i - row * widths.both());
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    join_kernel(Widths widths, const uint4* __restrict__ a,
                const uint4* __restrict__ b, const float* __restrict__ bias,
                uint4* __restrict__ y) {
  for_each(widths, [&](unsigned i, unsigned row, unsigned column) {
    if (column < widths.a) {
      y[i] = a[row * widths.a + column];
      return;
    }
    column -= widths.a;
    const uint4 bits = b[row * widths.b + column];
    if (bias == nullptr) {
      y[i] = bits;
      return;
    }
    Pack<T> pack;
    pack.unpack(bits);
#pragma unroll
    for (int j = 0; j < Pack<T>::kSize; ++j) {
      pack.v[j] += bias[column * Pack<T>::kSize + j];
    }
    pack.store(reinterpret_cast<T*>(y + i));
  });
}

/// Copies; the type does not matter.
__global__ void __launch_bounds__(kThreads)
    divide_kernel(Widths widths, const uint4* __restrict__ dy,
                  uint4* __restrict__ da, uint4* __restrict__ db) {
  for_each(widths, [&](unsigned i, unsigned row, unsigned column) {
    if (column < widths.a) {
      if (da != nullptr) da[row * widths.a + column] = dy[i];
    } else if (db != nullptr) {
      db[row * widths.b + column - widths.a] = dy[i];
    }
  });
}

Widths widths_of(const ConcatShape& shape) {
  const int64_t pack = shape.type == DType::kFloat32 ? 4 : 8;
  const int64_t both = (shape.a_channels + shape.b_channels) / pack;
  return {static_cast<unsigned>(shape.a_channels / pack),
          static_cast<unsigned>(shape.b_channels / pack),
          static_cast<unsigned>(shape.rows * both)};
}

unsigned blocks_of(const Widths& widths) {
  return (widths.total + kThreads * kAccesses - 1) / (kThreads * kAccesses);
}

}  // namespace

void concat_forward(const ConcatForward& launch, void* stream) {
  const Widths widths = widths_of(launch.shape);
  with_type(launch.shape.type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    join_kernel<T><<<blocks_of(widths), kThreads, 0,
                     static_cast<cudaStream_t>(stream)>>>(
        widths, static_cast<const uint4*>(launch.a),
        static_cast<const uint4*>(launch.b), launch.bias,
        static_cast<uint4*>(launch.y));
  });
  check_launch("concat_forward");
}

void concat_backward(const ConcatBackward& launch, void* stream) {
  const Widths widths = widths_of(launch.shape);
  divide_kernel<<<blocks_of(widths), kThreads, 0,
                  static_cast<cudaStream_t>(stream)>>>(
      widths, static_cast<const uint4*>(launch.dy),
      static_cast<uint4*>(launch.da), static_cast<uint4*>(launch.db));
  check_launch("concat_backward");
}

}  // namespace reprise::detail::kernels
