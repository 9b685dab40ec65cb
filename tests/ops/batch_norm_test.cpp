#include "compat/autocast.h"
#include "support.h"

#include <reprise/ops/batch_norm.h>

#include <vector>

namespace reprise {
namespace {

using testing::on_device;
using testing::relative_error;
using testing::same;
using torch::Tensor;

/// Peers in one process: replays what the others sent in a run of theirs.
class RecordedPeers final : public BatchNormPeers {
 public:
  Tensor gather(const Tensor& own) override {
    calls.push_back(own.clone());
    if (others.empty()) return own.unsqueeze(0);
    std::vector<Tensor> rows = {own};
    for (const auto& list : others) rows.push_back(list.at(calls.size() - 1));
    return torch::stack(rows);
  }
  std::vector<std::vector<Tensor>> others;
  std::vector<Tensor> calls;
};

torch::nn::BatchNorm2d make_norm(torch::ScalarType type = torch::kDouble) {
  torch::manual_seed(4);
  torch::nn::BatchNorm2d norm(5);
  const torch::NoGradGuard no_grad;
  norm->weight.uniform_(0.5, 2);
  norm->bias.uniform_(-1, 1);
  norm->to(testing::device(), type);
  return norm;
}

Tensor make_input(int64_t n, torch::ScalarType type = torch::kDouble) {
  torch::manual_seed(6);
  return (torch::randn({n, 5, 3, 4}, on_device(type)) * 3 + 7)
      .set_requires_grad(true);
}

Tensor sync(const torch::nn::BatchNorm2d& norm, const Tensor& x) {
  return ops::sync_batch_norm(batch_norm_state(*norm), x);
}

Tensor loss_of(const Tensor& y) {
  return (y * torch::sin(3 * y)).sum();
}

TEST(BatchNorm, OneProcessMatchesLibTorch) {
  auto expected = make_norm();
  auto norm = make_norm();
  EXPECT_FALSE(SyncBatchNormScope::active());
  EXPECT_THROW(sync(norm, make_input(6)), c10::Error);
  const SyncBatchNormScope scope(nullptr);
  EXPECT_TRUE(SyncBatchNormScope::active());
  for (int i = 0; i < 2; ++i) {
    const Tensor a = make_input(6), b = make_input(6);
    const Tensor wanted = expected->forward(a);
    const Tensor found = sync(norm, b);
    EXPECT_LT(relative_error(wanted, found), 1e-12);
    loss_of(wanted).backward();
    loss_of(found).backward();
    EXPECT_LT(relative_error(a.grad(), b.grad()), 1e-11);
  }
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_LT(relative_error(expected->parameters()[i].grad(),
                             norm->parameters()[i].grad()),
              1e-12);
  }
  EXPECT_LT(relative_error(expected->running_mean, norm->running_mean), 1e-12);
  EXPECT_LT(relative_error(expected->running_var, norm->running_var), 1e-12);
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 2);
}

// Six samples, divided into four, two and none.
TEST(BatchNorm, PartsHaveStatisticsOfWholeBatch) {
  auto whole_norm = make_norm();
  const Tensor x = make_input(6);
  const Tensor wanted = whole_norm->forward(x);
  loss_of(wanted).backward();

  const std::vector<std::pair<int64_t, int64_t>> parts = {{0, 4}, {4, 2}};
  // What a part sends in the forward does not depend on the others, but what it sends in the
  // backward does: it is recorded in a second round.
  std::vector<std::vector<Tensor>> said(2);
  std::vector<Tensor> outputs(2), gradients(2), weights(2);
  for (size_t round = 0; round < 3; ++round) {
    std::vector<std::vector<Tensor>> now(2);
    for (size_t me = 0; me < 2; ++me) {
      const auto peers = std::make_shared<RecordedPeers>();
      if (round > 0) {
        std::vector<Tensor> none;
        for (const auto& values : said[1 - me]) {
          none.push_back(torch::zeros_like(values));
        }
        peers->others = {said[1 - me], none};
      }
      auto norm = make_norm();
      const Tensor own = x.detach()
                             .narrow(0, parts[me].first, parts[me].second)
                             .clone()
                             .set_requires_grad(true);
      const SyncBatchNormScope scope(peers);
      const Tensor y = sync(norm, own);
      loss_of(y).backward();
      ASSERT_EQ(peers->calls.size(), 2u);
      now[me] = peers->calls;
      outputs[me] = y.detach();
      gradients[me] = own.grad();
      weights[me] = norm->weight.grad();
      if (round == 2) {
        EXPECT_LT(relative_error(whole_norm->running_mean, norm->running_mean),
                  1e-12);
        EXPECT_LT(relative_error(whole_norm->running_var, norm->running_var),
                  1e-12);
      }
    }
    said = now;
  }
  EXPECT_LT(relative_error(wanted, torch::cat(outputs)), 1e-12);
  EXPECT_LT(relative_error(x.grad(), torch::cat(gradients)), 1e-11);
  EXPECT_LT(relative_error(whole_norm->weight.grad(), weights[0] + weights[1]),
            1e-11);
}

TEST(BatchNorm, ProcessThatDoesNotCountContributesNothing) {
  const auto peers = std::make_shared<RecordedPeers>();
  Tensor other = torch::ones({11}, torch::kDouble);
  other[0] = 8;
  peers->others = {{other, torch::ones({10}, torch::kDouble)}};
  auto norm = make_norm();
  const Tensor x = make_input(1);
  Tensor y;
  {
    const SyncBatchNormScope scope(peers, /*counts=*/false);
    y = sync(norm, x);
  }
  y.backward(torch::zeros_like(y));  // after the scope
  ASSERT_EQ(peers->calls.size(), 2u);
  for (const auto& said : peers->calls) {
    EXPECT_EQ(said.abs().sum().item<double>(), 0);
  }
  EXPECT_EQ(x.grad().abs().sum().item<double>(), 0);
  EXPECT_EQ(norm->weight.grad().abs().sum().item<double>(), 0);
  // The running statistics are those of the other process.
  EXPECT_NEAR(norm->running_mean[0].item<double>(), 0.1, 1e-12);
}

TEST(BatchNorm, RejectsOneValuePerChannel) {
  auto norm = make_norm();
  const SyncBatchNormScope scope(nullptr);
  const Tensor x = torch::ones({1, 5, 1, 1}, on_device(torch::kDouble));
  EXPECT_THROW(sync(norm, x), c10::Error);
}

TEST(BatchNorm, HalfPrecisionHasFloat32Statistics) {
  auto norm = make_norm(torch::kFloat);
  auto expected = make_norm(torch::kFloat);
  const Tensor x = make_input(6, torch::kFloat).detach().to(torch::kBFloat16);
  const Tensor half = x.clone().set_requires_grad(true);
  const Tensor single = x.to(torch::kFloat).set_requires_grad(true);
  const SyncBatchNormScope scope(nullptr);
  const Tensor y = sync(norm, half);
  EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
  const Tensor wanted = expected->forward(single);
  EXPECT_LT(relative_error(wanted, y.to(torch::kFloat)), 0.01);
  EXPECT_LT(relative_error(expected->running_var, norm->running_var), 1e-6);
  y.backward(torch::ones_like(y) * y.detach());
  wanted.backward(wanted.detach());
  EXPECT_EQ(half.grad().scalar_type(), torch::kBFloat16);
  EXPECT_LT(relative_error(expected->weight.grad(), norm->weight.grad()), 0.01);
}

TEST(BatchNorm, ModuleSynchronizesWhileScopeIsOpen) {
  SyncBatchNorm2d norm(5);
  norm->to(testing::device(), torch::kDouble);
  torch::nn::BatchNorm2d expected(5);
  expected->to(testing::device(), torch::kDouble);
  const Tensor x = make_input(6);
  EXPECT_TRUE(same(norm->forward(x), expected->forward(x)));
  const auto peers = std::make_shared<RecordedPeers>();
  {
    const SyncBatchNormScope scope(peers);
    EXPECT_LT(relative_error(expected->forward(x), norm->forward(x)), 1e-12);
    EXPECT_EQ(peers->calls.size(), 1u);
    EXPECT_THROW(SyncBatchNormScope another(nullptr), c10::Error);
    norm->eval();
    expected->eval();
    EXPECT_LT(relative_error(expected->forward(x), norm->forward(x)), 1e-12);
    EXPECT_EQ(peers->calls.size(), 1u);
  }
  norm->train();
  EXPECT_THROW(norm->forward(torch::ones_like(x[0])), c10::Error);
  EXPECT_THROW(norm->forward(torch::ones({1, 5, 1, 1}, x.options())),
               c10::Error);
}

}  // namespace
}  // namespace reprise
