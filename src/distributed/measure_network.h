#pragma once

#include <reprise/distributed/group.h>
#include <reprise/plan/cluster.h>

#include <torch/types.h>

#include <cstdint>

namespace reprise::detail {

enum class Collective { kAllReduce, kAllToAll, kAllGather };

/// Collective. Measures operations on small tensors and on tensors of `bytes`, two at a time as
/// in a training, and returns the network of which rings would take as long; all ranks get the
/// same. Backends differ in how well an operation uses a link in both directions. Tested by
/// tests/distributed/group_test.cpp.
Network measure_network(RankGroup& group, torch::Device device,
                        Collective collective, int64_t bytes);

}  // namespace reprise::detail
