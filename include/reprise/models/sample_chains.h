#pragma once

#include <reprise/recompute/chain.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace reprise {

struct SampleChainOptions {
  torch::Device device = torch::kCPU;
  int64_t batch = 6;
  /// Wrap part of each block in checkpoint(), in addition to the schedule.
  bool nested_checkpoint = false;
};

/// A small chain with features that are difficult to recompute, and data for it, to verify
/// schedules with. Its last stage returns the sum of the losses and their number.
struct SampleChain {
  std::string name;
  std::string description;
  /// Makes the chain, initialized from LibTorch's default generator.
  std::function<Chain(const SampleChainOptions&)> make_chain;
  /// Makes a random batch, from LibTorch's default generator.
  std::function<Tensors(const SampleChainOptions&)> make_inputs;
};

/// tiny-mlp (dropout), tiny-cnn (BatchNorm), tiny-transformer (dropout, tied weights) and
/// tiny-skip (skip connections and a mask that cross stages).
const std::vector<SampleChain>& sample_chains();

}  // namespace reprise
