#pragma once

#include "host_store.h"
#include "support.h"

#include <reprise/recompute/execution.h>
#include <reprise/recompute/host_memory.h>

#include <algorithm>
#include <utility>

namespace reprise::testing {

/// Returns a schedule that keeps all stages; those given run as their last
/// variant.
inline Schedule keep_on_host(const Chain& chain,
                             const std::vector<int>& stages) {
  std::vector<Op> ops;
  for (int i = 0; i < chain.size(); ++i) {
    const bool host =
        std::find(stages.begin(), stages.end(), i) != stages.end();
    ops.push_back({OpKind::kForwardKeep, i, host ? host_variant(chain[i]) : 0});
  }
  for (int i = chain.size() - 1; i >= 0; --i) {
    ops.push_back({OpKind::kBackward, i});
  }
  return Schedule("on the host", chain.size(), ops);
}

struct Outcome {
  Tensors outputs;
  Tensors gradients;
  Tensors input_gradients;
};

inline Outcome run_by(const Chain& chain, const Schedule& schedule,
                      const Tensors& inputs) {
  Execution execution(chain, schedule);
  Outcome outcome;
  outcome.outputs = execution.forward(inputs);
  Tensors gradients;
  for (const auto& output : outcome.outputs) {
    gradients.push_back(torch::ones_like(output));
  }
  outcome.input_gradients = execution.backward(std::move(gradients));
  outcome.gradients = take_gradients(chain.parameters());
  return outcome;
}

inline ::testing::AssertionResult equal(const Tensors& a, const Tensors& b) {
  if (a.size() != b.size()) return ::testing::AssertionFailure() << "sizes";
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].defined() != b[i].defined() ||
        (a[i].defined() && !torch::equal(a[i], b[i]))) {
      return ::testing::AssertionFailure() << "tensor " << i << " differs";
    }
  }
  return ::testing::AssertionSuccess();
}

/// Compares bit by bit, on CUDA too: the same kernels run on the same values.
inline void expect_equal(const Outcome& a, const Outcome& b) {
  EXPECT_TRUE(equal(a.outputs, b.outputs));
  EXPECT_TRUE(equal(a.gradients, b.gradients));
  EXPECT_TRUE(equal(a.input_gradients, b.input_gradients));
}

}  // namespace reprise::testing
