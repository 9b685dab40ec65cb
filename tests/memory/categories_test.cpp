#include "support.h"

#include <reprise/memory/categories.h>
#include <reprise/memory/meter.h>

#include <torch/optim.h>

namespace reprise {
namespace {

using testing::device;
using testing::on_device;

constexpr int64_t kWidth = 256;
constexpr int64_t kBytes = kWidth * kWidth * 4;

std::vector<torch::Tensor> moments_of(const torch::optim::Adam& optimizer) {
  std::vector<torch::Tensor> moments;
  for (const auto& entry : optimizer.state()) {
    const auto& state =
        static_cast<const torch::optim::AdamParamState&>(*entry.second);
    moments.insert(moments.end(), {state.exp_avg(), state.exp_avg_sq()});
  }
  return moments;
}

TEST(Categories, AccountForEveryLiveByte) {
  const int64_t before = live_bytes(device());
  torch::nn::Linear linear(
      torch::nn::LinearOptions(kWidth, kWidth).bias(false));
  linear->to(device());
  torch::optim::Adam optimizer(linear->parameters());
  const auto data = torch::randn({kWidth, kWidth}, on_device());
  const KeptMeter meter(linear->parameters());

  MemoryLedger ledger(device());
  ledger.claim_model(linear->parameters(), linear->buffers());
  ledger.claim(Category::kOptimizer, [&] { return moments_of(optimizer); });
  ledger.claim(Category::kData, [&] { return std::vector{data}; });
  ledger.claim_kept(meter);

  torch::Tensor loss;
  {
    const KeptMeter::Scope scope(meter, 0);
    loss = linear(data).tanh().sum();
  }
  auto now = ledger.measure();
  EXPECT_EQ(now[Category::kParameters], kBytes);
  EXPECT_EQ(now[Category::kData], kBytes);
  EXPECT_EQ(now[Category::kGradients], 0);
  EXPECT_EQ(now[Category::kOptimizer], 0);
  // The autograd graph also saved its input, which is claimed as data.
  EXPECT_EQ(meter.live_bytes(), 2 * kBytes);
  EXPECT_EQ(now[Category::kActivations], kBytes);
  EXPECT_EQ(now.activations_by_stage, std::vector<int64_t>{kBytes});

  loss.backward();
  optimizer.step();
  loss.reset();
  const auto scratch = torch::empty({2 * kWidth, kWidth}, on_device());
  now = ledger.measure();
  EXPECT_EQ(now[Category::kGradients], kBytes);
  EXPECT_EQ(now[Category::kOptimizer], 2 * kBytes);
  EXPECT_EQ(now[Category::kActivations], 0);
  EXPECT_EQ(now[Category::kWorkspace], before + 2 * kBytes);
  int64_t sum = 0;
  for (const int64_t bytes : now.bytes) sum += bytes;
  EXPECT_EQ(sum, now.total_bytes);
}

TEST(Categories, NamesMatchTheSummary) {
  EXPECT_EQ(to_text(Category::kParameters), "parameters");
  EXPECT_EQ(to_text(Category::kWorkspace), "workspace");
}

TEST(Categories, WorkspaceCannotBeClaimed) {
  MemoryLedger ledger(torch::kCPU);
  EXPECT_THROW(ledger.claim(Category::kWorkspace, [] { return Tensors{}; }),
               c10::Error);
}

}  // namespace
}  // namespace reprise
