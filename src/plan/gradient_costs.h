#pragma once

#include <reprise/plan/costs.h>
#include <reprise/recompute/simulate.h>

/// Costs of a chain with the memory of its parameters' gradients, which depends on the progress
/// of the backward, and with that of parameters that are on the device for a time only. Tested
/// by tests/plan/gradient_costs_test.cpp.
namespace reprise::detail {

/// Costs of a micro-batch that adds to the gradients. The first one of a window allocates them.
/// The others find them allocated and hold a second copy of some.
ChainCosts accumulating_costs(ChainCosts chain_costs,
                              const CostProfile& profile, bool first);

/// Costs of a micro-batch whose backward updates the parameters and frees their gradients. Those
/// between two cuts of the autograd graph are alive at once, with the temporaries of their
/// update, and others until the first stage that uses their parameter.
ChainCosts updating_costs(ChainCosts chain_costs, const CostProfile& profile);

/// Autograd graphs in a backward that updates the parameters, at least.
int graphs_of_updates(const CostProfile& profile);

}  // namespace reprise::detail
