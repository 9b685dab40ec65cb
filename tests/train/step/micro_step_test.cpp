#include "train/step/micro_step.h"

#include "accumulate/small_gradients.h"
#include "support.h"

#include <reprise/recompute/strategy.h>

#include <map>

namespace reprise::testing {
namespace {

using detail::MicroStep;

// Wide enough for the biases to have less than 1/64 of all values.
constexpr int64_t kWidth = 80;

struct Small {
  torch::nn::Linear first{nullptr}, last{nullptr};
  Chain chain;

  Small() : chain(stages()) {}

  std::vector<Stage> stages() {
    torch::manual_seed(5);
    first = torch::nn::Linear(kWidth, kWidth);
    last = torch::nn::Linear(kWidth, kWidth);
    first->to(device());
    last->to(device());
    return {make_stage("first", first), make_stage("last", last),
            make_stage("sum",
                       [](const torch::Tensor& x) { return x.sin().sum(); })};
  }
};

/// Runs two micro-batches. Returns the gradients of the last stage when the
/// execution reports them final, and at the end.
std::pair<torch::Tensor, torch::Tensor> gradients(bool final_on_the_way) {
  Small small;
  torch::Tensor told;
  Execution execution(small.chain, make_schedule("none", 3),
                      {.cuts = {1}, .final_from = [&](int stage) {
                         if (stage == 1) told = small.last->bias.grad().clone();
                       }});
  MicroStep step(device(), {}, smallest_parameters(small.chain.parameters()));
  step.set_weight(1);
  for (int i = 0; i < 2; ++i) {
    step.run(execution, {torch::full({2, kWidth}, i + 0.5, on_device())},
             {.final_on_the_way = final_on_the_way});
  }
  return {told, small.last->bias.grad()};
}

TEST(MicroStep, GradientsAreCompleteWhenReportedFinal) {
  const auto [told, end] = gradients(/*final_on_the_way=*/true);
  EXPECT_TRUE(same(told, end));
  // If small gradients are accumulated together, they are complete only at the
  // end; the sums are the same.
  const auto [early, sum] = gradients(/*final_on_the_way=*/false);
  EXPECT_FALSE(same(early, sum));
  EXPECT_TRUE(same(sum, end));
}

TEST(MicroStep, OperatorsOfWeightCopiesAddTheirGradients) {
  const Small small;
  const torch::Device cuda(torch::kCUDA, 0);  // not used
  const auto parameters = small.chain.parameters();
  const auto all = MicroStep::small_of(cuda, parameters, nullptr);
  ASSERT_EQ(all.size(), 2u);  // the biases
  const WeightCopies copies({small.first->weight, small.first->bias},
                            torch::kFloat);
  const auto rest = MicroStep::small_of(cuda, parameters, &copies);
  ASSERT_EQ(rest.size(), 1u);
  EXPECT_TRUE(rest[0].is_same(small.last->bias));
  EXPECT_TRUE(MicroStep::small_of(torch::kCPU, parameters, nullptr).empty());
}

}  // namespace
}  // namespace reprise::testing
