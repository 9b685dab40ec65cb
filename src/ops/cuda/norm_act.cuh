#pragma once

#include "norm_act.h"
#include "rows.cuh"

#include <type_traits>

/// Shared by the kernels that apply a norm to channels-last images.
/// Tested by tests/ops/norm_act_test.cpp.
namespace reprise::detail::kernels {

/// NormValues with the sizes that select statistics.
struct NormOf {
  NormValues values;
  int channels, groups;

  __device__ int statistic_of(int instance, int channel) const {
    if (groups == 0) return channel;
    return instance * groups + channel / (channels / groups);
  }
};

inline NormOf norm_of(const RowsShape& shape, const NormValues& values) {
  return {values, static_cast<int>(shape.channels),
          static_cast<int>(shape.groups)};
}

/// The norm of the columns of a thread: (x − mean) · scale + bias.
template <int kWidth>
struct Lines {
  float mean[kWidth], scale[kWidth], bias[kWidth];

  __device__ Lines(const NormOf& norm, int instance, int vector) {
    const NormValues& v = norm.values;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const int channel = vector * kWidth + j;
      const int statistic = norm.statistic_of(instance, channel);
      mean[j] = v.mean == nullptr ? 0 : v.mean[statistic];
      scale[j] = v.mean == nullptr
                     ? 1
                     : v.inverse_deviation[statistic] * v.weight[channel];
      // Adding −0 changes nothing, not even the sign of a zero.
      bias[j] = v.bias == nullptr ? -0.f : v.bias[channel];
    }
  }
  __device__ float at(int j, float x) const {
    return fmaf(x - mean[j], scale[j], bias[j]);
  }
};

/// Factors of x − mean and 1 in the gradient of x.
template <int kWidth>
struct Slopes {
  float factor[kWidth], constant[kWidth];

  __device__ Slopes(const NormOf& norm, const float* coefficients, int instance,
                    int vector) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const int s = norm.statistic_of(instance, vector * kWidth + j);
      factor[j] = coefficients[2 * s];
      constant[j] = coefficients[2 * s + 1];
    }
  }
  /// Gradient of x from the gradient g of the norm's output.
  __device__ float at(int j, const Lines<kWidth>& lines, float x, float g) const {
    return fmaf(g, lines.scale[j],
                fmaf(x - lines.mean[j], factor[j], constant[j]));
  }
};

/// The activation; ReLU propagates NaN.
template <Activation kAct>
__device__ float activate(float z) {
  if constexpr (kAct == Activation::kRelu) {
    return z > 0 ? z : (z != z ? z : 0);
  } else if constexpr (kAct == Activation::kSilu) {
    return __fdividef(z, 1 + __expf(-z));
  } else {
    return z;
  }
}

/// Gradient of the activation's input z from that of its output.
template <Activation kAct>
__device__ float through(float z, float dy) {
  if constexpr (kAct == Activation::kRelu) {
    return z > 0 ? dy : 0;
  } else if constexpr (kAct == Activation::kSilu) {
    const float s = __fdividef(1, 1 + __expf(-z));
    return dy * s * fmaf(z, 1 - s, 1.0f);
  } else {
    return dy;
  }
}

/// Calls `use` with a std::integral_constant of the activation.
template <class F>
void with_activation(Activation activation, F&& use) {
  switch (activation) {
    case Activation::kNone:
      return use(std::integral_constant<Activation, Activation::kNone>());
    case Activation::kRelu:
      return use(std::integral_constant<Activation, Activation::kRelu>());
    case Activation::kSilu:
      return use(std::integral_constant<Activation, Activation::kSilu>());
  }
}

}  // namespace reprise::detail::kernels
