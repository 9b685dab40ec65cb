#pragma once

#include "recompute/random_costs.h"

#include <cmath>
#include <random>
#include <vector>

namespace reprise::testing {

/// Kinds of random chains on which the solver is compared with ExactSchedules.
enum class ChainKind {
  kUniform,        ///< independent, uniformly distributed sizes
  kAlike,          ///< stages of similar sizes
  kFarApart,       ///< sizes over two orders of magnitude, large ones first
  kPassedThrough,  ///< as kUniform, with tensors passed through stages
};

inline ChainCosts random_chain(std::mt19937& random, ChainKind kind,
                               int stages) {
  std::uniform_real_distribution<double> part(0, 1);
  if (kind == ChainKind::kUniform || kind == ChainKind::kPassedThrough) {
    ChainCosts chain_costs = random_costs(
        random, {.stages = stages,
                 .max_bytes = part(random) < 0.3 ? 1000 : 100'000'000,
                 .max_ms = part(random) < 0.3 ? 20 : 5,
                 .variants = part(random) < 0.5,
                 .passed_through = kind == ChainKind::kPassedThrough});
    // Like a loss: ExactSchedules requires a new output.
    StageCosts& last = chain_costs.stages.back();
    last.outputs.resize(1);
    last.saved_outputs = {};
    for (auto& variant : last.variants) variant.saved_outputs = {};
    return chain_costs;
  }
  const bool alike = kind == ChainKind::kAlike;
  const auto near = [&](double bytes) {
    const double factor =
        alike ? 0.8 + 0.4 * part(random) : std::pow(10, 2 * part(random) - 1);
    return static_cast<int64_t>(bytes * factor);
  };
  const auto up_to = [&](int most) {
    return std::uniform_int_distribution<int>(0, most)(random);
  };
  std::vector<StageCosts> list;
  for (int i = 0; i < stages; ++i) {
    const double bytes = alike ? 1e6 : 1e6 * std::pow(0.5, 4 * i / stages);
    auto stage = StageCosts::simple(near(bytes), near(2 * bytes), 1 + up_to(4),
                                    up_to(9));
    stage.keep_extra_bytes = stage.drop_extra_bytes = near(bytes / 4);
    if (part(random) < 0.3) {
      StageCosts::Variant lean = stage;
      lean.saved_bytes = 0;
      lean.saved_outputs = {};
      lean.backward_ms += 1 + up_to(1);
      stage.variants = {lean};
    }
    list.push_back(std::move(stage));
  }
  return ChainCosts::simple(1'000'000, std::move(list));
}

/// Budgets for comparisons, as multiples of the smallest one.
inline std::vector<double> compared_budgets() {
  return {1, 1.001, 1.01, 1.03, 1.1, 1.3, 1.7, 2.5, 4, 8};
}

}  // namespace reprise::testing
