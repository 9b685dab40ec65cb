#pragma once

#include <reprise/recompute/chain_of.h>

#include <vector>

namespace reprise::detail {

/// Returns LibTorch's modules whose `forward` takes and returns tensors only.
/// Containers without a `forward` are not among them. Thread-safe. Tested by
/// tests/recompute/chain_of_test.cpp.
const std::vector<ModuleType>& libtorch_modules();

}  // namespace reprise::detail
