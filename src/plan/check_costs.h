#pragma once

#include <reprise/plan/costs.h>

#include <string>

namespace reprise::detail {

/// Returns why a profile that was read from a file cannot be used: sizes that do not fit each
/// other, indices of tensors that do not exist, numbers that no measurement gives. Empty if it
/// can. Tested by tests/plan/costs_test.cpp.
std::string why_not_usable(const CostProfile& profile);

}  // namespace reprise::detail
