#include "compat/cuda.h"
#include "models/small_models.h"
#include "support.h"

#include <reprise/models/model.h>
#include <reprise/verify/verify.h>

namespace reprise {
namespace {

using testing::device;

VerifyOptions how() {
  VerifyOptions options;
  options.tolerance = device().is_cuda() ? 1e-5 : 0;
  if (device().is_cuda()) compat::set_cuda_deterministic(true);
  return options;
}

VerifySubject subject_of(const SampleChain& sample, bool nested) {
  SampleChainOptions plain;
  plain.device = device();
  SampleChainOptions tested = plain;
  tested.nested_checkpoint = nested;
  return {sample.name, [=] { return sample.make_chain(tested); },
          [=] { return sample.make_inputs(plain); },
          [=] { return sample.make_chain(plain); }};
}

std::string text_of(const VerifyReport& report) {
  std::string text = report.subject + " " + report.strategy;
  for (const auto& row : report.rows) {
    text += "; " + to_text(row.what) + " " + std::to_string(row.different) +
            "/" + std::to_string(row.tensors) + " " + row.worst + " " +
            std::to_string(row.max_relative);
  }
  return text;
}

void expect_same_everywhere(bool nested) {
  for (const SampleChain& sample : sample_chains()) {
    const auto subject = subject_of(sample, nested);
    const int n = sample.make_chain({}).size();
    std::vector<std::string> strategies = {"none", "all", "sqrt"};
    for (int k = 1; k <= n; ++k) {
      strategies.push_back("every:" + std::to_string(k));
      strategies.push_back("checkpoints:" + std::to_string(k - 1));
      strategies.push_back("revolve:" + std::to_string(k));
    }
    for (const auto& text : strategies) {
      const auto report = verify(subject, Strategy::parse(text), how());
      EXPECT_TRUE(report.same) << text_of(report);
      ASSERT_EQ(report.rows.size(), 5u);
      // Something was compared, and training changed the parameters.
      EXPECT_EQ(report.rows[0].tensors, 3);
      EXPECT_GT(report.rows[1].tensors, 10);
      EXPECT_EQ(report.runs, report.simulated_runs);
      if (!nested) {
        EXPECT_NEAR(double(report.kept_peak_bytes) /
                        double(report.simulated_kept_bytes),
                    1, 0.02)
            << text_of(report);
      }
    }
  }
}

TEST(Verify, AllStrategiesPassOnAllSampleChains) {
  expect_same_everywhere(/*nested=*/false);
}

TEST(Verify, AllStrategiesPassWithCheckpointsInsideStages) {
  expect_same_everywhere(/*nested=*/true);
}

/// A chain that differs from its reference.
VerifyReport with_stage(
    const std::function<torch::Tensor(torch::Tensor)>& bad) {
  const auto make = [](const std::function<torch::Tensor(torch::Tensor)>& f) {
    torch::nn::Linear linear(4, 4);
    linear->to(device());
    return Chain(
        {make_stage("linear", linear), make_stage("middle", f),
         make_stage("loss", [](const torch::Tensor& x) {
           return Tensors{x.square().sum(), torch::full({}, 8.0, x.options())};
         })});
  };
  const VerifySubject subject{
      "bad", [=] { return make(bad); },
      [] {
        return Tensors{torch::randn({2, 4}, testing::on_device())};
      },
      [=] {
        return make([](const torch::Tensor& x) { return torch::sin(x); });
      }};
  return verify(subject, Strategy::parse("all"), how());
}

TEST(Verify, RejectsUnregisteredParameters) {
  const auto scale = torch::ones({4}, testing::on_device()).requires_grad_();
  const auto text = testing::error_of([&] {
    with_stage([scale](const torch::Tensor& x) { return x * scale; });
  });
  EXPECT_NE(text.find("expected stage 1 'middle' to use parameters of its "
                      "modules only"),
            std::string::npos)
      << text;
}

TEST(Verify, DetectsEveryDifference) {
  EXPECT_TRUE(
      with_stage([](const torch::Tensor& x) { return torch::sin(x); }).same);
  const auto value =
      with_stage([](const torch::Tensor& x) { return torch::sin(x) * 1.0001; });
  EXPECT_FALSE(value.same);
  EXPECT_FALSE(value.rows[0].same);
  EXPECT_GT(value.rows[0].max_relative, 1e-5);
  int calls = 0;
  const auto recomputed = with_stage([&calls](const torch::Tensor& x) {
    return ++calls % 2 == 0 ? torch::sin(x * 1.001) : torch::sin(x);
  });
  EXPECT_FALSE(recomputed.same);
  EXPECT_TRUE(recomputed.rows[0].worst.empty() ||
              recomputed.rows[0].worst != "update 0, loss");
  EXPECT_FALSE(recomputed.rows[1].same);
  const auto random = with_stage([](const torch::Tensor& x) {
    torch::rand({1}, x.options());
    return torch::sin(x);
  });
  EXPECT_FALSE(random.rows[3].same);
}

// With stages that return the sum of the losses only.
TEST(Verify, BuiltInModelsPass) {
  for (const testing::SmallModel& small : testing::small_models()) {
    const Model model = make_model(small.name, small.options);
    const VerifySubject subject{
        .name = small.name,
        .make_chain =
            [&] {
              const Model made = make_model(small.name, small.options);
              made.root->to(device());
              made.root->train();
              return made.chain;
            },
        .make_inputs = [&] { return testing::small_inputs(model); },
        .count = 3};
    VerifyOptions options = how();
    options.updates = 2;
    const VerifyReport report =
        verify(subject, Strategy::parse("every:2"), options);
    EXPECT_TRUE(report.same) << text_of(report);
    EXPECT_GT(report.rows.at(1).tensors, 0);
  }
}

}  // namespace
}  // namespace reprise
