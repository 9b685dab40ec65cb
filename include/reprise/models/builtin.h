#pragma once

#include <reprise/recompute/chain.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace reprise {

struct BuiltinOptions {
  torch::Device device = torch::kCPU;
  int64_t batch = 6;
  /// Wrap part of each block in checkpoint(), inside whatever the schedule
  /// does.
  bool nested_checkpoint = false;
};

/// A small chain with the difficulties of a large one, and data for it. Its
/// last stage returns the sum of the losses and the count they are of.
struct Builtin {
  std::string name;
  std::string description;
  /// Initialised from LibTorch's default generator.
  std::function<Chain(const BuiltinOptions&)> make_chain;
  /// A random batch, from LibTorch's default generator.
  std::function<Tensors(const BuiltinOptions&)> make_inputs;
};

/// tiny-mlp (dropout), tiny-cnn (BatchNorm), tiny-transformer (dropout, tied
/// weights), tiny-skip (skip connections and a mask that cross stages).
const std::vector<Builtin>& builtins();

}  // namespace reprise
