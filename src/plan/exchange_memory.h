#pragma once

#include <reprise/plan/costs.h>
#include <reprise/plan/modes.h>

#include <cstdint>
#include <vector>

namespace reprise::detail {

/// Gradients that ranks exchange together.
struct SentBucket {
  int64_t gradient_bytes = 0;  ///< of the parameters
  int64_t bytes = 0;           ///< with padding
  int ready_stage = 0;         ///< stage whose backward completes it
};

/// How GradientReducer exchanges them.
struct ExchangeRules {
  int ranks = 1;         ///< that share one copy of what is divided
  bool divided = false;  ///< each rank gets its share of the sums
  bool half = false;     ///< sent as bfloat16
  /// The gradients stay where they are, and get the sums.
  bool keeps_gradients = false;
  /// Buckets that may be on the way at a time, if they are divided; 0 for any number.
  int most_in_flight = 0;
  /// Ranks gather the updated parameters.
  bool gathers_updated = false;
};

/// Rules of a level. `ranks`: those that share one copy.
ExchangeRules rules_of(Sharding shard, int ranks, bool half = false);

/// The memory of an exchange, from its `buckets` in the order in which they are sent. Tested by
/// tests/plan/exchange_memory_test.cpp.
ExchangeMemory exchange_memory(const std::vector<SentBucket>& buckets,
                               int stages, const ExchangeRules& rules);

}  // namespace reprise::detail
