#pragma once

#include <reprise/recompute/chain.h>
#include <reprise/recompute/simulate.h>

namespace reprise {

/// Measures the figures of every stage of `chain` on `inputs`, one stage at a
/// time: at most one stage's graph exists at any moment. Each stage runs
/// forward and backward `repeats` + 1 times; times are medians. Gradients,
/// buffers and random generators are afterwards as they were before. Needs
/// grad mode; inputs and modules on one device.
ChainFigures trace(const Chain& chain, const Tensors& inputs, int repeats = 1);

}  // namespace reprise
