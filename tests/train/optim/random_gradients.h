#pragma once

#include <reprise/data/safetensors.h>

#include <torch/types.h>
#include <torch/utils.h>

namespace reprise::testing {

/// Sets the gradients of `parameters` to random values that depend on `seed` alone.
inline void set_random_gradients(NamedTensors& parameters, uint64_t seed) {
  torch::manual_seed(seed);
  for (auto& [name, p] : parameters) p.mutable_grad() = torch::randn_like(p);
}

}  // namespace reprise::testing
