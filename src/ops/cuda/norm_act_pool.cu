#include "norm_act_pool.h"
#include "norm_act.cuh"

namespace reprise::detail::kernels {
namespace {

constexpr int kStride = static_cast<int>(PoolWindow::kStride);

/// Sizes of the images and of their pooled outputs.
struct Pool {
  int height, width, pooled_height, pooled_width, padding;
};

/// Positions of the columns of a thread, one byte each.
template <int kWidth>
struct Bytes {
  unsigned words[kWidth / 4];
};

/// Replicates the highest bits of selected bytes of `value`; `selector` has four
/// hexadecimal digits, 8 + the number of a byte.
__device__ unsigned spread(unsigned value, unsigned selector) {
#ifdef __CUDA_ARCH__
  unsigned result;
  asm("prmt.b32 %0, %1, %1, %2;" : "=r"(result) : "r"(value), "r"(selector));
  return result;
#else
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned byte = value >> (selector >> 4 * i & 3) * 8 & 255;
    result |= (byte & 128 ? 255u : 0u) << 8 * i;
  }
  return result;
#endif
}

__device__ unsigned& word(uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
__device__ unsigned word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

/// Operations on the columns in one 32-bit word: one float32, or two half-precision values.
template <class T>
struct Packed {
  static constexpr int kValues = 4 / sizeof(T);
  /// −∞ in every column.
  static __device__ unsigned lowest();
  static __device__ unsigned max(unsigned a, unsigned b);  // NaN if one is
  /// All bits of columns in which a equals b.
  static __device__ unsigned equal(unsigned a, unsigned b);
  /// `value` in every column, as an integer.
  static __device__ unsigned repeat(unsigned value) {
    return kValues == 1 ? value : value * 0x10001u;
  }
};
template <>
inline __device__ unsigned Packed<float>::lowest() {
  return 0xff800000u;
}
template <>
inline __device__ unsigned Packed<float>::max(unsigned a, unsigned b) {
  const float x = __uint_as_float(a), y = __uint_as_float(b);
  return x > y || x != x ? a : b;
}
template <>
inline __device__ unsigned Packed<float>::equal(unsigned a, unsigned b) {
  return __uint_as_float(a) == __uint_as_float(b) ? ~0u : 0;
}
template <>
inline __device__ unsigned Packed<__nv_bfloat16>::lowest() {
  return 0xff80ff80u;
}
template <>
inline __device__ unsigned Packed<__nv_bfloat16>::max(unsigned a, unsigned b) {
  const __nv_bfloat162 r =
      __hmax2_nan(reinterpret_cast<const __nv_bfloat162&>(a),
                  reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const unsigned&>(r);
}
template <>
inline __device__ unsigned Packed<__nv_bfloat16>::equal(unsigned a, unsigned b) {
  return __heq2_mask(reinterpret_cast<const __nv_bfloat162&>(a),
                     reinterpret_cast<const __nv_bfloat162&>(b));
}
template <>
inline __device__ unsigned Packed<__half>::lowest() {
  return 0xfc00fc00u;
}
template <>
inline __device__ unsigned Packed<__half>::max(unsigned a, unsigned b) {
  const __half2 r = __hmax2_nan(reinterpret_cast<const __half2&>(a),
                                reinterpret_cast<const __half2&>(b));
  return reinterpret_cast<const unsigned&>(r);
}
template <>
inline __device__ unsigned Packed<__half>::equal(unsigned a, unsigned b) {
  return __heq2_mask(reinterpret_cast<const __half2&>(a),
                     reinterpret_cast<const __half2&>(b));
}

/// The sign bits of the columns with a negative scale.
template <class T>
__device__ uint4 signs_of(const Lines<kVector<T>>& lines) {
  constexpr int kValues = Packed<T>::kValues;
  uint4 signs = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int j = 0; j < kVector<T>; ++j) {
    const unsigned bit = 1u << (32 / kValues * (j % kValues + 1) - 1);
    if (lines.scale[j] < 0) word(signs, j / kValues) |= bit;
  }
  return signs;
}

/// Position of the first maximum of each column, as integers in the columns, from the
/// values of the window. Writes the maxima.
template <class T, int kValues>
__device__ uint4 find_maxima(const uint4 (&values)[kValues], uint4& maxima) {
  uint4 positions;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unsigned best = word(values[0], i);
#pragma unroll
    for (int k = 1; k < kValues; ++k) {
      best = Packed<T>::max(best, word(values[k], i));
    }
    unsigned position = Packed<T>::repeat(PoolWindow::kZeroed);
#pragma unroll
    for (int k = kValues - 1; k >= 0; --k) {
      const unsigned mask = Packed<T>::equal(word(values[k], i), best);
      position = (mask & Packed<T>::repeat(k)) | (~mask & position);
    }
    word(maxima, i) = best;
    word(positions, i) = position;
  }
  return positions;
}

/// One vector of outputs at a time. The norm is monotonic, so the maximum is found among
/// the values of x, with their signs inverted if the scale is negative.
template <class T, bool kRelu, int kKernel>
__global__ void __launch_bounds__(kRowThreads, 2)
    apply_pool_kernel(Tiles t, Pool pool, NormOf norm, const uint4* x, uint4* y,
                      Bytes<kVector<T>>* positions) {
  constexpr int kWidth = kVector<T>;
  constexpr int kValues = Packed<T>::kValues;
  const Place place(t);
  if (place.count == 0) return;
  const Lines<kWidth> lines(norm, place.instance, place.vector);
  const uint4 signs = signs_of<T>(lines);
  for (int i = place.count - 1; i >= 0; --i) {
    const int row = place.row(i);
    const int line = row / pool.pooled_width;
    const int sample = line / pool.pooled_height;
    const int top = (line - sample * pool.pooled_height) * kStride - pool.padding;
    const int left = (row - line * pool.pooled_width) * kStride - pool.padding;
    uint4 window[kKernel * kKernel];
#pragma unroll
    for (int k = 0; k < kKernel * kKernel; ++k) {
      const int h = top + k / kKernel, w = left + k % kKernel;
      const bool inside = h >= 0 && h < pool.height && w >= 0 && w < pool.width;
      const int64_t at =
          (static_cast<int64_t>(sample) * pool.height + h) * pool.width + w;
      const unsigned low = Packed<T>::lowest();
      window[k] = inside ? x[at * t.vectors + place.vector]
                         : make_uint4(low ^ signs.x, low ^ signs.y,
                                      low ^ signs.z, low ^ signs.w);
    }
#pragma unroll
    for (int k = 0; k < kKernel * kKernel; ++k) {
#pragma unroll
      for (int m = 0; m < 4; ++m) word(window[k], m) ^= word(signs, m);
    }
    uint4 maxima;
    const uint4 found = find_maxima<T>(window, maxima);
#pragma unroll
    for (int m = 0; m < 4; ++m) word(maxima, m) ^= word(signs, m);
    float v[kWidth];
    unpack<T>(maxima, v);
    Bytes<kWidth> bytes = {};
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      v[j] = lines.at(j, v[j]);
      unsigned position =
          word(found, j / kValues) >> (32 / kValues * (j % kValues)) & 255;
      if constexpr (kRelu) {
        if (v[j] <= 0) position = PoolWindow::kZeroed;
        v[j] = activate<Activation::kRelu>(v[j]);
      }
      bytes.words[j / 4] |= position << 8 * (j % 4);
    }
    y[place.at(i)] = pack<T>(v);
    positions[place.at(i)] = bytes;
  }
}

/// Adds the gradients `slope` in the columns whose maximum is at `position` to d.
template <class T>
__device__ void add_matching(const uint4& slope, const Bytes<kVector<T>>& bytes,
                             unsigned position, float (&d)[kVector<T>]) {
  constexpr int kWidth = kVector<T>;
  uint4 masked;
#pragma unroll
  for (int i = 0; i < kWidth / 4; ++i) {
    // The highest bit of each byte that is equal.
    const unsigned off = bytes.words[i] ^ position * 0x1010101u;
    const unsigned low = (off & 0x7f7f7f7fu) + 0x7f7f7f7fu;
    const unsigned equal = ~(low | off | 0x7f7f7f7fu);
    if constexpr (kWidth == 4) {
      masked = make_uint4(slope.x & spread(equal, 0x8888),
                          slope.y & spread(equal, 0x9999),
                          slope.z & spread(equal, 0xaaaa),
                          slope.w & spread(equal, 0xbbbb));
    } else {
      word(masked, 2 * i) = word(slope, 2 * i) & spread(equal, 0x9988);
      word(masked, 2 * i + 1) = word(slope, 2 * i + 1) & spread(equal, 0xbbaa);
    }
  }
  float g[kWidth];
  unpack<T>(masked, g);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) d[j] += g[j];
}

/// A tile of 2 × 2 elements of x, of which the first is the first of the window with the
/// same index. With a kernel of 3, the windows to the left and above contain it as well.
template <class T, int kKernel>
struct PoolTile {
  static constexpr int kSpan = (kKernel + kStride - 1) / kStride;
  int sample, row, column;
  int64_t elements[4];  // indices of the vectors of x; negative: outside of the image
  uint4 slope[kSpan * kSpan];
  Bytes<kVector<T>> bytes[kSpan * kSpan];

  __device__ PoolTile(const Pool& pool, int tile, int vector, int vectors) {
    const int across = (pool.width + pool.padding + kStride - 1) / kStride;
    const int down = (pool.height + pool.padding + kStride - 1) / kStride;
    const int line = tile / across;
    sample = line / down;
    row = line - sample * down;
    column = tile - line * across;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int h = row * kStride - pool.padding + e / 2;
      const int w = column * kStride - pool.padding + e % 2;
      const bool inside = h >= 0 && h < pool.height && w >= 0 && w < pool.width;
      const int64_t at =
          (static_cast<int64_t>(sample) * pool.height + h) * pool.width + w;
      elements[e] = inside ? at * vectors + vector : -1;
    }
  }
  __device__ void load(const Pool& pool, int vector, int vectors, const uint4* dy,
                       const Bytes<kVector<T>>* positions) {
#pragma unroll
    for (int k = 0; k < kSpan * kSpan; ++k) {
      const int a = row - k / kSpan, b = column - k % kSpan;
      const bool inside =
          a >= 0 && b >= 0 && a < pool.pooled_height && b < pool.pooled_width;
      const int64_t at = (static_cast<int64_t>(sample) * pool.pooled_height + a) *
                             pool.pooled_width + b;
      slope[k] = inside ? dy[at * vectors + vector] : make_uint4(0, 0, 0, 0);
      bytes[k] = {};
      if (inside) bytes[k] = positions[at * vectors + vector];
    }
  }
  /// Gradient of the norm's output for element e.
  __device__ void gather(int e, float (&d)[kVector<T>]) const {
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j) d[j] = 0;
#pragma unroll
    for (int k = 0; k < kSpan * kSpan; ++k) {
      const int in_row = e / 2 + k / kSpan * kStride;
      const int in_column = e % 2 + k % kSpan * kStride;
      if (in_row < kKernel && in_column < kKernel) {
        add_matching<T>(slope[k], bytes[k], in_row * kKernel + in_column, d);
      }
    }
  }
};

template <class T, int kKernel, bool kNorm>
__global__ void __launch_bounds__(kRowThreads, 2)
    pool_sums_kernel(Tiles t, Pool pool, NormOf norm, const uint4* x,
                     const uint4* dy, const Bytes<kVector<T>>* positions,
                     uint4* dx, float2* scratch) {
  constexpr int kWidth = kVector<T>;
  const Place place(t);
  float sum[kWidth] = {}, product[kWidth] = {};
  if (place.count > 0) {
    const Lines<kWidth> lines(norm, place.instance, place.vector);
    for (int i = 0; i < place.count; ++i) {
      PoolTile<T, kKernel> tile(pool, place.row(i), place.vector, t.vectors);
      uint4 from[4];
      if constexpr (kNorm) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          from[e] = x[tile.elements[e] < 0 ? 0 : tile.elements[e]];
        }
      }
      tile.load(pool, place.vector, t.vectors, dy, positions);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (tile.elements[e] < 0) continue;
        float d[kWidth], v[kWidth] = {};
        tile.gather(e, d);
        if constexpr (kNorm) {
          unpack<T>(from[e], v);
        } else {
          dx[tile.elements[e]] = pack<T>(d);
        }
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          sum[j] += d[j];
          if constexpr (kNorm) {
            product[j] = fmaf(d[j], v[j] - lines.mean[j], product[j]);
          }
        }
      }
    }
  }
  write_partial_sums(t, place, sum, product, scratch);
}

template <class T, int kKernel>
__global__ void __launch_bounds__(kRowThreads, 2)
    pool_slope_kernel(Tiles t, Pool pool, NormOf norm, const float* coefficients,
                      const uint4* x, const uint4* dy,
                      const Bytes<kVector<T>>* positions, uint4* dx) {
  constexpr int kWidth = kVector<T>;
  const Place place(t);
  if (place.count == 0) return;
  const Lines<kWidth> lines(norm, place.instance, place.vector);
  const Slopes<kWidth> slopes(norm, coefficients, place.instance, place.vector);
  for (int i = place.count - 1; i >= 0; --i) {
    PoolTile<T, kKernel> tile(pool, place.row(i), place.vector, t.vectors);
    uint4 from[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      from[e] = x[tile.elements[e] < 0 ? 0 : tile.elements[e]];
    }
    tile.load(pool, place.vector, t.vectors, dy, positions);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (tile.elements[e] < 0) continue;
      float d[kWidth], v[kWidth];
      tile.gather(e, d);
      unpack<T>(from[e], v);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) v[j] = slopes.at(j, lines, v[j], d[j]);
      dx[tile.elements[e]] = pack<T>(v);
    }
  }
}

Pool pool_of(const RowsShape& shape, const PoolWindow& window) {
  return {static_cast<int>(shape.height), static_cast<int>(shape.width),
          static_cast<int>(window.outputs(shape.height)),
          static_cast<int>(window.outputs(shape.width)),
          static_cast<int>(window.padding)};
}

/// Division of the 2 × 2 tiles of x.
Tiles pool_tiles(const RowsShape& shape, const PoolWindow& window) {
  const auto tiles = [&](int64_t side) {
    return (side + window.padding + kStride - 1) / kStride;
  };
  const int64_t rows = shape.samples / shape.instances() * tiles(shape.height) *
                       tiles(shape.width);
  return tiles_of(shape, rows, shape.sum_parts());
}

template <int kValue>
using Int = std::integral_constant<int, kValue>;

/// Calls `use` with a null pointer to the element type, and the window's kernel.
template <class F>
void with_window(const RowsShape& shape, const PoolWindow& window, F&& use) {
  with_type(shape.type, [&](auto* type) {
    window.kernel == 2 ? use(type, Int<2>()) : use(type, Int<3>());
  });
}

unsigned blocks_of(const RowsShape& shape, const Tiles& tiles) {
  return static_cast<unsigned>(shape.instances() * tiles.blocks_of_instance());
}

const uint4* vectors(const void* data) {
  return static_cast<const uint4*>(data);
}

}  // namespace

void norm_act_pool_forward(const NormActPoolForward& args, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  RowsShape pooled = args.shape;
  pooled.height = args.window.outputs(args.shape.height);
  pooled.width = args.window.outputs(args.shape.width);
  const Tiles tiles =
      tiles_of(pooled, pooled.rows_of_instance(), pooled.parts(264));
  const NormOf norm = norm_of(args.shape, args.norm);
  const Pool pool = pool_of(args.shape, args.window);
  with_window(args.shape, args.window, [&](auto* type, auto kernel_size) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kKernel = decltype(kernel_size)::value;
    const auto launch = [&](auto kernel) {
      kernel<<<blocks_of(pooled, tiles), kRowThreads, 0, on>>>(
          tiles, pool, norm, vectors(args.norm.x), static_cast<uint4*>(args.y),
          reinterpret_cast<Bytes<kVector<T>>*>(args.positions));
    };
    args.activation == Activation::kRelu
        ? launch(apply_pool_kernel<T, true, kKernel>)
        : launch(apply_pool_kernel<T, false, kKernel>);
  });
  check_launch("norm_act_pool_forward");
}

void norm_act_pool_sums(const NormActPoolSums& args, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const RowsShape& shape = args.shape;
  const Tiles tiles = pool_tiles(shape, args.window);
  const NormOf norm = norm_of(shape, args.norm);
  const Pool pool = pool_of(shape, args.window);
  with_window(shape, args.window, [&](auto* type, auto kernel_size) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kKernel = decltype(kernel_size)::value;
    const auto launch = [&](auto kernel) {
      kernel<<<blocks_of(shape, tiles), kRowThreads, 0, on>>>(
          tiles, pool, norm, vectors(args.norm.x), vectors(args.dy),
          reinterpret_cast<const Bytes<kVector<T>>*>(args.positions),
          static_cast<uint4*>(args.dx), reinterpret_cast<float2*>(args.scratch));
    };
    args.norm.mean == nullptr ? launch(pool_sums_kernel<T, kKernel, false>)
                              : launch(pool_sums_kernel<T, kKernel, true>);
  });
  check_launch("norm_act_pool_sums");
}

void norm_act_pool_backward(const NormActPoolBackward& args, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const RowsShape& shape = args.shape;
  const Tiles tiles = pool_tiles(shape, args.window);
  const NormOf norm = norm_of(shape, args.norm);
  const Pool pool = pool_of(shape, args.window);
  with_window(shape, args.window, [&](auto* type, auto kernel_size) {
    using T = std::remove_pointer_t<decltype(type)>;
    pool_slope_kernel<T, decltype(kernel_size)::value>
        <<<blocks_of(shape, tiles), kRowThreads, 0, on>>>(
            tiles, pool, norm, args.coefficients, vectors(args.norm.x),
            vectors(args.dy),
            reinterpret_cast<const Bytes<kVector<T>>*>(args.positions),
            static_cast<uint4*>(args.dx));
  });
  check_launch("norm_act_pool_backward");
}

}  // namespace reprise::detail::kernels
