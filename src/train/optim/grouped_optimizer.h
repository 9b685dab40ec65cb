#pragma once

#include <reprise/train/optimizer.h>

#include <memory>

namespace reprise::detail {

/// Returns an optimizer that divides the parameters by `options.groups` and updates each
/// group, and the rest, with settings of its own. Its state has the names of an optimizer
/// without groups, except "step", which has the number of the group appended. Tested by
/// tests/train/optim/grouped_optimizer_test.cpp.
std::unique_ptr<Optimizer> make_grouped_optimizer(
    const OptimizerOptions& options, const NamedTensors& parameters);

}  // namespace reprise::detail
