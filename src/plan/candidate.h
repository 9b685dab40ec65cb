#pragma once

#include "plan/evaluator_cache.h"

#include <reprise/plan/planner.h>

#include <cstdint>
#include <optional>
#include <tuple>

/// Tested by tests/plan/planner_test.cpp.
namespace reprise::detail {

/// The best plans for one precision and micro-batch size, with a CUDA graph or
/// without, and one way to update.
struct Candidate {
  CandidateKey key;
  /// The fastest plan that fits by its predicted time. Not computed if enough
  /// other candidates are known to be faster.
  std::optional<Plan> predicted{};
  bool was_predicted = false;
  /// The fastest plan that fits of those that were tried.
  std::optional<Plan> tried{};
  /// The fastest plan that may be returned, possibly after it has been tried.
  std::optional<Plan> plan{};
  bool to_be_tried = false;

  Precision precision() const { return std::get<0>(key); }
  int64_t micro_batch() const { return std::get<1>(key); }
  bool graph() const { return std::get<2>(key); }
  UpdateMode update() const { return std::get<3>(key); }
  /// Whether the keys differ at most in `graph` and `update`.
  bool same_size(const Candidate& other) const {
    return precision() == other.precision() &&
           micro_batch() == other.micro_batch();
  }
};

}  // namespace reprise::detail
