#pragma once

#include "compat/autocast.h"
#include "support.h"

#include <reprise/ops/linear.h>

#include <torch/types.h>

namespace reprise::testing {

/// Autocast to bfloat16 on the device of the tests.
inline compat::AutocastState half() {
  compat::AutocastState state;
  (device().is_cuda() ? state.cuda_enabled : state.cpu_enabled) = true;
  state.cuda_dtype = state.cpu_dtype = torch::kBFloat16;
  return state;
}

struct Layer {
  torch::Tensor x, weight, bias;
  ops::WeightLayout layout;
};

inline Layer make_layer(ops::WeightLayout layout, bool bias = true) {
  torch::manual_seed(5);
  const auto options = on_device(torch::kFloat);
  Layer made;
  made.layout = layout;
  made.x = torch::randn({3, 7, 40}, options).requires_grad_();
  const auto sizes = layout == ops::WeightLayout::kOutIn
                         ? std::vector<int64_t>{24, 40}
                         : std::vector<int64_t>{40, 24};
  made.weight = torch::randn(sizes, options).mul_(0.2).requires_grad_();
  if (bias) made.bias = torch::randn({24}, options).requires_grad_();
  return made;
}

/// Output of the second and gradients of two micro-batches.
struct LinearOutcome {
  torch::Tensor y;
  Tensors gradients;
};

inline LinearOutcome run_layer(const Layer& layer, bool autocast) {
  torch::Tensor y;
  for (int i = 0; i < 2; ++i) {
    {
      const compat::AutocastGuard guard(autocast ? half()
                                                 : compat::AutocastState{});
      y = ops::linear(layer.x * (1 + i), layer.weight, layer.bias,
                      layer.layout);
    }
    (y.to(torch::kFloat).sin().sum() / 3).backward();
  }
  Tensors of = {layer.x, layer.weight};
  if (layer.bias.defined()) of.push_back(layer.bias);
  return {y.detach(), take_gradients(of)};
}

}  // namespace reprise::testing
