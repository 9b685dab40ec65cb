#include "activation.h"
#include "row_stripes.cuh"

#include <type_traits>

namespace reprise::detail::kernels {
namespace {

/// Value and derivative of an activation.
struct Slope {
  float value, derivative;
};

// Products and sums are explicit, so that the compiler contracts them in the same way in all
// kernels and a recomputed activation has the same bits.

__device__ float sigmoid(float x) {
  return __fdividef(1.0f, __fadd_rn(1.0f, __expf(-x)));
}

/// 0.5 x (1 + tanh(u)) with u = √(2/π) (x + 0.044715 x³); this is x sigmoid(2 u).
struct GeluTanh {
  static constexpr float kLinear = 1.5957691216057308f;    // 2 √(2/π)
  static constexpr float kCubic = 0.07135481282553486f;    // kLinear · 0.044715
  static constexpr float kSlope = 0.21406443847660458f;    // 3 kCubic

  static __device__ Slope at(float x) {
    const float square = __fmul_rn(x, x);
    const float s = sigmoid(__fmul_rn(x, __fmaf_rn(square, kCubic, kLinear)));
    const float value = __fmul_rn(x, s);
    const float inner = __fmaf_rn(square, kSlope, kLinear);
    return {value, __fmaf_rn(__fmul_rn(value, __fsub_rn(1.0f, s)), inner, s)};
  }
};

/// x Φ(x) with the distribution function of the normal distribution, by formula 7.1.26 of
/// Abramowitz and Stegun for erf: the error is below 1.5e-7.
struct GeluErf {
  static __device__ Slope at(float x) {
    constexpr float kSqrtHalf = 0.7071067811865476f;
    constexpr float kDensity = 0.3989422804014327f;  // 1 / √(2 π)
    const float z = __fmul_rn(fabsf(x), kSqrtHalf);
    const float t = __fdividef(1.0f, __fmaf_rn(0.3275911f, z, 1.0f));
    float sum = __fmaf_rn(t, 1.061405429f, -1.453152027f);
    sum = __fmaf_rn(t, sum, 1.421413741f);
    sum = __fmaf_rn(t, sum, -0.284496736f);
    sum = __fmaf_rn(t, sum, 0.254829592f);
    const float e = __expf(-__fmul_rn(z, z));
    const float tail = __fmul_rn(__fmul_rn(0.5f, __fmul_rn(t, sum)), e);
    const float cdf = x < 0 ? tail : __fsub_rn(1.0f, tail);
    return {__fmul_rn(x, cdf),
            __fmaf_rn(__fmul_rn(x, kDensity), e, cdf)};
  }
};

struct Relu {
  static __device__ Slope at(float x) {
    return {x < 0 ? 0.0f : x, x <= 0 ? 0.0f : 1.0f};
  }
};

struct Silu {
  static __device__ Slope at(float x) {
    const float s = sigmoid(x);
    const float value = __fmul_rn(x, s);
    return {value, __fmaf_rn(value, __fsub_rn(1.0f, s), s)};
  }
};

/// Calls `use` with an object of the type of the activation.
template <class F>
void with_activation(ActivationKind kind, F&& use) {
  switch (kind) {
    case ActivationKind::kGeluTanh:
      return use(GeluTanh{});
    case ActivationKind::kGeluErf:
      return use(GeluErf{});
    case ActivationKind::kRelu:
      return use(Relu{});
    case ActivationKind::kSilu:
      return use(Silu{});
  }
}

constexpr int kThreads = 256;
constexpr int kVectors = 4;  // of eight elements per thread

template <class T, class Activation>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(int64_t vectors, const Eight<T>* x, Eight<T>* y) {
  const int64_t first =
      int64_t{blockIdx.x} * kThreads * kVectors + threadIdx.x;
  Eight<T> eights[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (first + i * kThreads < vectors) eights[i] = x[first + i * kThreads];
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (first + i * kThreads >= vectors) return;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 two = eights[i].pair(j);
      eights[i].set_pair(j, make_float2(Activation::at(two.x).value,
                                        Activation::at(two.y).value));
    }
    y[first + i * kThreads] = eights[i];
  }
}

template <class T, class Activation, bool kRecompute>
struct BackwardPass {
  static constexpr int kColumns = 8, kMinLanes = 16;
  static constexpr int kUnroll = 2, kBlocksPerProcessor = 2;
  struct Loaded {
    Eight<T> x, dy;
  };
  const T* x;
  const T* dy;
  T* dx;
  T* y;

  __device__ Loaded load(int64_t at) const {
    return {*reinterpret_cast<const Eight<T>*>(x + at),
            *reinterpret_cast<const Eight<T>*>(dy + at)};
  }
  __device__ void use(int64_t at, const Loaded& loaded,
                      float (&totals)[8]) const {
    Eight<T> out, again;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = loaded.x.pair(i), slope = loaded.dy.pair(i);
      const Slope a = Activation::at(two.x), b = Activation::at(two.y);
      const float2 result =
          make_float2(slope.x * a.derivative, slope.y * b.derivative);
      totals[2 * i] += result.x;
      totals[2 * i + 1] += result.y;
      out.set_pair(i, result);
      if constexpr (kRecompute) again.set_pair(i, make_float2(a.value, b.value));
    }
    *reinterpret_cast<Eight<T>*>(dx + at) = out;
    if constexpr (kRecompute) *reinterpret_cast<Eight<T>*>(y + at) = again;
  }
};

}  // namespace

void activation_forward(const ActivationForward& args, void* stream) {
  if (args.count == 0) return;
  const int64_t vectors = args.count / 8;
  constexpr int64_t kPerBlock = int64_t{kThreads} * kVectors;
  const auto blocks = static_cast<unsigned>((vectors + kPerBlock - 1) / kPerBlock);
  with_half(args.type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    with_activation(args.kind, [&](auto activation) {
      forward_kernel<T, decltype(activation)>
          <<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
              vectors, static_cast<const Eight<T>*>(args.x),
              static_cast<Eight<T>*>(args.y));
    });
  });
  check_launch("activation_forward");
}

void activation_backward(const ActivationBackward& args, void* stream) {
  const ColumnSumsShape& shape = args.shape;
  if (shape.columns == 0) return;
  const StripeSums out{shape.rows,
                       shape.columns,
                       static_cast<int>(shape.parts()),
                       args.scratch,
                       args.sums,
                       args.add};
  with_half(shape.type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    with_activation(args.kind, [&](auto activation) {
      const auto run = [&](auto recompute) {
        const BackwardPass<T, decltype(activation), decltype(recompute)::value>
            pass{static_cast<const T*>(args.x), static_cast<const T*>(args.dy),
                 static_cast<T*>(args.dx), static_cast<T*>(args.y)};
        run_stripes(pass, out, static_cast<cudaStream_t>(stream));
      };
      if (args.y != nullptr) return run(std::true_type());
      run(std::false_type());
    });
  });
  check_launch("activation_backward");
}

}  // namespace reprise::detail::kernels
