#include "compat/rng.h"
#include "memory/failure.h"
#include "support.h"

#include <reprise/memory/meter.h>
#include <reprise/recompute/execution.h>
#include <reprise/recompute/strategy.h>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/dropout.h>

#include <limits>

namespace reprise {
namespace {

using testing::device;
using testing::on_device;
using testing::same;
using testing::take_gradients;

constexpr int64_t kBlockWidth = 8;
constexpr int kBlocks = 7;
constexpr int64_t kAll = std::numeric_limits<int64_t>::max();

struct Blocks {
  std::vector<torch::Tensor> buffers;
  Chain chain;
};

/// Blocks with BatchNorm and dropout. Blocks 0, 3 and 6 share a weight if `tied`.
Blocks make_blocks(bool tied) {
  torch::manual_seed(2);
  std::vector<Stage> stages;
  std::vector<torch::Tensor> buffers;
  torch::nn::Linear shared(kBlockWidth, kBlockWidth);
  for (int i = 0; i < kBlocks; ++i) {
    torch::nn::Linear linear =
        tied && i % 3 == 0 ? shared
                           : torch::nn::Linear(kBlockWidth, kBlockWidth);
    torch::nn::BatchNorm1d norm(kBlockWidth);
    torch::nn::Dropout dropout(0.2);
    for (const auto& buffer : norm->buffers()) buffers.push_back(buffer);
    stages.push_back(make_stage("block" + std::to_string(i),
                                [=](const torch::Tensor& x) mutable {
                                  return x +
                                         torch::tanh(dropout(norm(linear(x))));
                                },
                                {linear.ptr(), norm.ptr(), dropout.ptr()}));
  }
  return {std::move(buffers), Chain(std::move(stages))};
}

struct Continued {
  std::vector<torch::Tensor> values;  ///< gradients, buffers, input gradient
  std::vector<int> reported;          ///< to final_from
  int64_t allocations = 0;            ///< in the backward
  bool continued = false;
  bool failed = false;
};

/// Two micro-batches, in the second one with a failed allocation in the backward, which is
/// continued with `rest`, itself with failing allocations if `fails_again`.
Continued run_continued(const Blocks& net, const std::string& strategy,
                        bool cuts, int64_t failing,
                        const std::string& rest = "all",
                        bool fails_again = false, int64_t most_held = kAll) {
  const torch::NoGradGuard no_grad;
  for (torch::Tensor buffer : net.buffers) buffer.zero_();
  torch::manual_seed(5);
  Continued result;
  std::vector<int>& reported = result.reported;
  ExecutionOptions options;
  options.final_from = [&reported](int stage) { reported.push_back(stage); };
  if (cuts) options.cuts = {2, 5};
  Execution execution(net.chain, make_schedule(strategy, kBlocks), options);

  const torch::AutoGradMode with_grad(true);
  const torch::Tensor x =
      torch::randn({6, kBlockWidth}, on_device()).requires_grad_();
  auto y = execution.forward({x});
  execution.allow_continuing(most_held);
  execution.backward({torch::ones_like(y[0])});
  reported.clear();

  const auto copies = [&] {
    std::vector<torch::Tensor> list;
    for (const auto& buffer : net.buffers) list.push_back(buffer.clone());
    return list;
  };
  const auto restore = [&](const std::vector<torch::Tensor>& list) {
    const torch::NoGradGuard guard;
    for (size_t i = 0; i < list.size(); ++i) {
      torch::Tensor(net.buffers[i]).copy_(list[i]);
    }
  };
  const auto start = copies();
  const auto start_rng = compat::RngState::capture({x});
  y = execution.forward({x});
  const auto reached = copies();
  const auto reached_rng = compat::RngState::capture({x});
  Tensors gradients;
  Tensors ones = {torch::ones_like(y[0])};
  {
    execution.allow_continuing(most_held);
    const AllocationFailure failure(failing);
    try {
      gradients = execution.backward(std::move(ones));
    } catch (const c10::Error& error) {
      EXPECT_TRUE(is_out_of_memory(error)) << error.what();
      result.failed = true;
    }
    result.allocations = failure.counted();
  }
  if (result.failed && execution.stages_left() == 0) {
    take_gradients(net.chain.parameters());
    return result;
  }
  for (int64_t after = 0; result.failed; ++after) {
    EXPECT_FALSE(reported.empty());
    EXPECT_EQ(execution.stages_left(), reported.back());
    const auto failure = std::make_unique<AllocationFailure>(
        fails_again ? 5 * after : std::numeric_limits<int64_t>::max());
    try {
      restore(start);
      start_rng.restore();
      execution.rerun_forward({x},
                              make_schedule(rest, execution.stages_left()));
      gradients = execution.continue_backward();
      break;
    } catch (const c10::Error& error) {
      EXPECT_TRUE(is_out_of_memory(error)) << error.what();
      if (execution.stages_left() == 0) {
        take_gradients(net.chain.parameters());
        return result;
      }
    }
  }
  result.continued = result.failed;
  if (result.failed) {
    EXPECT_EQ(execution.stages_left(), 0);
    restore(reached);
    reached_rng.restore();
  }
  result.values = take_gradients(net.chain.parameters());
  result.values.push_back(gradients.at(0));
  for (const auto& buffer : copies()) result.values.push_back(buffer);
  return result;
}

void expect_same_values(const Continued& a, const Continued& b,
                        const std::string& what) {
  ASSERT_EQ(a.values.size(), b.values.size()) << what;
  for (size_t i = 0; i < a.values.size(); ++i) {
    EXPECT_TRUE(same(a.values[i], b.values[i])) << what << ", value " << i;
  }
}

/// Fails at allocations all over a backward.
TEST(ContinueBackward, GivesTheSameGradients) {
  if (device().is_cuda()) GTEST_SKIP() << "failures are injected on the CPU";
  for (const bool tied : {false, true}) {
    const Blocks net = make_blocks(tied);
    for (const char* strategy : {"none", "all", "revolve:2", "checkpoints:2"}) {
      for (const bool cuts : {false, true}) {
        const Continued plain = run_continued(net, strategy, cuts, kAll);
        int continued = 0;
        for (int64_t after = 0; after < plain.allocations; after += 7) {
          const std::string what =
              std::string(strategy) + (tied ? ", tied" : "") +
              (cuts ? ", cuts" : "") + ", allocation " + std::to_string(after);
          const Continued result = run_continued(
              net, strategy, cuts, after, after % 2 ? "all" : "revolve:1");
          EXPECT_TRUE(result.failed) << what;
          if (!result.continued) continue;
          ++continued;
          expect_same_values(result, plain, what);
        }
        const bool one_graph = strategy == std::string("none") && !cuts;
        EXPECT_EQ(continued > 0, !one_graph) << strategy;
      }
    }
  }
}

TEST(ContinueBackward, MayFailAgain) {
  if (device().is_cuda()) GTEST_SKIP() << "failures are injected on the CPU";
  const Blocks net = make_blocks(false);
  const Continued plain = run_continued(net, "all", false, kAll);
  int continued = 0;
  for (int64_t after = 0; after < plain.allocations; after += 20) {
    const Continued result =
        run_continued(net, "all", false, after, "all", true);
    if (!result.continued) continue;
    ++continued;
    expect_same_values(result, plain, "allocation " + std::to_string(after));
    // Every stage once, from the last to the first.
    EXPECT_EQ(result.reported, plain.reported);
  }
  EXPECT_GT(continued, 0);
}

/// Larger gradients are freed as early as without allow_continuing(): a failure inside of an
/// autograd graph ends the backward. One between two graphs does not.
TEST(ContinueBackward, HoldsNoLargeGradients) {
  if (device().is_cuda()) GTEST_SKIP() << "failures are injected on the CPU";
  const Blocks net = make_blocks(false);
  const Continued plain = run_continued(net, "all", false, kAll);
  int continued = 0, continued_if_held = 0;
  for (int64_t after = 0; after < plain.allocations; after += 3) {
    const std::string what = "allocation " + std::to_string(after);
    const Continued result =
        run_continued(net, "all", false, after, "all", false, 0);
    if (result.continued) {
      ++continued;
      expect_same_values(result, plain, what);
    }
    const Continued held = run_continued(net, "all", false, after);
    continued_if_held += held.continued ? 1 : 0;
    EXPECT_LE(result.continued, held.continued) << what;
  }
  EXPECT_GT(continued, 0);
  EXPECT_LT(continued, continued_if_held);
}

TEST(ContinueBackward, NeedsAFailedBackward) {
  const Blocks net = make_blocks(false);
  Execution execution(net.chain, make_schedule("all", kBlocks));
  execution.allow_continuing(kAll);
  EXPECT_EQ(execution.stages_left(), 0);
  EXPECT_THROW(execution.rerun_forward({torch::ones({6, kBlockWidth})},
                                       make_schedule("all", kBlocks)),
               c10::Error);
  EXPECT_THROW(execution.continue_backward(), c10::Error);
}

}  // namespace
}  // namespace reprise
