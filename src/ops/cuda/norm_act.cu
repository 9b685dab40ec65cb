#include "norm_act.h"
#include "norm_act.cuh"

namespace reprise::detail::kernels {
namespace {

// The second pass over a matrix starts with the rows that the first one read last, which
// are still in the cache. Threads process a batch of rows at a time, and load all of them
// before they use the first; the last batch loads its last row several times.

// The exponential of SiLU needs more registers.
template <Activation kAct>
constexpr int kFewer = kAct == Activation::kSilu ? 1 : 0;

template <class T, Activation kAct, bool kResidual>
__global__ void __launch_bounds__(kRowThreads, 4 - kFewer<kAct>)
    apply_kernel(Tiles t, NormOf norm, const uint4* x, const uint4* residual,
                 uint4* y) {
  constexpr int kWidth = kVector<T>;
  constexpr int kBatch = kResidual ? 2 : 4;
  const Place place(t);
  if (place.count == 0) return;
  const Lines<kWidth> lines(norm, place.instance, place.vector);
  for (int i = place.count - 1; i >= 0; i -= kBatch) {
    uint4 from[kBatch], added[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int64_t at = place.at(max(i - u, 0));
      from[u] = x[at];
      if constexpr (kResidual) added[u] = residual[at];
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      if (i < u) continue;
      float v[kWidth], r[kWidth] = {};
      unpack<T>(from[u], v);
      if constexpr (kResidual) unpack<T>(added[u], r);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        v[j] = activate<kAct>(lines.at(j, v[j]) + r[j]);
      }
      y[place.at(i - u)] = pack<T>(v);
    }
  }
}

/// What the gradient of the activation is computed from.
enum class Source {
  kInput,     // x
  kResidual,  // x and the residual
  kOutput,    // y, with a ReLU
  kNoNorm,    // y, with a ReLU; x is not read
};

template <class T, Activation kAct, Source kSource>
__global__ void __launch_bounds__(kRowThreads, 3 - kFewer<kAct>)
    sums_kernel(Tiles t, NormOf norm, const uint4* x, const uint4* dy,
                const uint4* other, uint4* g, float2* scratch) {
  constexpr int kWidth = kVector<T>;
  constexpr int kBatch = 2;
  constexpr bool kOther = kSource != Source::kInput;
  constexpr bool kNorm = kSource != Source::kNoNorm;
  const Place place(t);
  float sum[kWidth] = {}, product[kWidth] = {};
  if (place.count > 0) {
    const Lines<kWidth> lines(norm, place.instance, place.vector);
    for (int i = 0; i < place.count; i += kBatch) {
      uint4 from[kBatch], slope[kBatch], third[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int64_t at = place.at(min(i + u, place.count - 1));
        if constexpr (kNorm) from[u] = x[at];
        slope[u] = dy[at];
        if constexpr (kOther) third[u] = other[at];
      }
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        if (i + u >= place.count) continue;
        float v[kWidth] = {}, d[kWidth], z[kWidth] = {};
        if constexpr (kNorm) unpack<T>(from[u], v);
        unpack<T>(slope[u], d);
        if constexpr (kOther) unpack<T>(third[u], z);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          if constexpr (kSource == Source::kInput ||
                        kSource == Source::kResidual) {
            z[j] += lines.at(j, v[j]);
          }
          d[j] = through<kAct>(z[j], d[j]);
        }
        if constexpr (kOther) {
          const uint4 rounded = pack<T>(d);
          g[place.at(i + u)] = rounded;
          unpack<T>(rounded, d);
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

template <class T, Activation kAct>
__global__ void __launch_bounds__(kRowThreads, 3 - kFewer<kAct>)
    slope_kernel(Tiles t, NormOf norm, const float* coefficients,
                 const uint4* x, const uint4* dy, uint4* dx) {
  constexpr int kWidth = kVector<T>;
  constexpr int kBatch = 2;
  const Place place(t);
  if (place.count == 0) return;
  const Lines<kWidth> lines(norm, place.instance, place.vector);
  const Slopes<kWidth> slopes(norm, coefficients, place.instance, place.vector);
  for (int i = place.count - 1; i >= 0; i -= kBatch) {
    uint4 from[kBatch], slope[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int64_t at = place.at(max(i - u, 0));
      from[u] = x[at];
      slope[u] = dy[at];
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      if (i < u) continue;
      float v[kWidth], d[kWidth];
      unpack<T>(from[u], v);
      unpack<T>(slope[u], d);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float g = through<kAct>(lines.at(j, v[j]), d[j]);
        v[j] = slopes.at(j, lines, v[j], g);
      }
      dx[place.at(i - u)] = pack<T>(v);
    }
  }
}

Tiles tiles_of_pass(const RowsShape& shape, int64_t blocks) {
  return tiles_of(shape, shape.rows_of_instance(), shape.parts(blocks));
}

unsigned blocks_of(const RowsShape& shape, const Tiles& tiles) {
  return static_cast<unsigned>(shape.instances() * tiles.blocks_of_instance());
}

const uint4* vectors(const void* data) {
  return static_cast<const uint4*>(data);
}

}  // namespace

void norm_act_forward(const NormActForward& args, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const Tiles tiles = tiles_of_pass(args.shape, 528);
  const NormOf norm = norm_of(args.shape, args.norm);
  with_type(args.shape.type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    with_activation(args.activation, [&](auto activation) {
      const auto launch = [&](auto kernel) {
        kernel<<<blocks_of(args.shape, tiles), kRowThreads, 0, on>>>(
            tiles, norm, vectors(args.norm.x), vectors(args.residual),
            static_cast<uint4*>(args.y));
      };
      constexpr Activation kAct = decltype(activation)::value;
      args.residual == nullptr ? launch(apply_kernel<T, kAct, false>)
                               : launch(apply_kernel<T, kAct, true>);
    });
  });
  check_launch("norm_act_forward");
}

void norm_act_sums(const NormActSums& args, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const RowsShape& shape = args.shape;
  const Tiles tiles =
      tiles_of(shape, shape.rows_of_instance(), shape.sum_parts());
  const NormOf norm = norm_of(shape, args.norm);
  const bool no_norm = args.norm.mean == nullptr;
  const void* other = args.residual != nullptr ? args.residual : args.y;
  with_type(shape.type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto launch = [&](auto kernel) {
      kernel<<<blocks_of(shape, tiles), kRowThreads, 0, on>>>(
          tiles, norm, vectors(args.norm.x), vectors(args.dy), vectors(other),
          static_cast<uint4*>(args.g), reinterpret_cast<float2*>(args.scratch));
    };
    if (no_norm) {
      return launch(sums_kernel<T, Activation::kRelu, Source::kNoNorm>);
    }
    if (args.residual != nullptr) {
      return launch(sums_kernel<T, Activation::kSilu, Source::kResidual>);
    }
    if (args.y != nullptr) {
      return launch(sums_kernel<T, Activation::kRelu, Source::kOutput>);
    }
    with_activation(args.activation, [&](auto activation) {
      launch(sums_kernel<T, decltype(activation)::value, Source::kInput>);
    });
  });
  check_launch("norm_act_sums");
}

void norm_act_backward(const NormActBackward& args, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const Tiles tiles = tiles_of_pass(args.shape, 396);
  const NormOf norm = norm_of(args.shape, args.norm);
  with_type(args.shape.type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    with_activation(args.activation, [&](auto activation) {
      slope_kernel<T, decltype(activation)::value>
          <<<blocks_of(args.shape, tiles), kRowThreads, 0, on>>>(
              tiles, norm, args.coefficients, vectors(args.norm.x),
              vectors(args.dy), static_cast<uint4*>(args.dx));
    });
  });
  check_launch("norm_act_backward");
}

}  // namespace reprise::detail::kernels
