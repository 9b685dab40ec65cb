// Compiles and runs the C++ samples of the pages, which scripts/extract_samples.py writes to
// samples/. scripts/check_docs.py fails if a page has a sample that is not included here.
#include "docs/sample_models.h"

#include <gtest/gtest.h>

#include <iostream>

namespace reprise::testing {
namespace {

using torch::Tensor;

Tensor loss_of(const Tensor& outputs, const Tensor& targets) {
  return (outputs - targets).square().mean();
}

// What the functions in samples call without capturing it.
std::shared_ptr<const Dataset> own_dataset() {
  return std::make_shared<Rows>();
}

std::shared_ptr<const Dataset> open_data() {
  return std::make_shared<Rows>();
}

TEST(Samples, Chain) {
  torch::nn::Sequential model(torch::nn::Linear(4, 8), torch::nn::Tanh(),
                              torch::nn::Linear(8, 2));
  const Tensor x = torch::randn({3, 4}), targets = torch::randn({3, 2});
#include "samples/chain.cpp"
  EXPECT_EQ(chain.size(), 3);
  EXPECT_TRUE(has_gradients(model->parameters()));
}

TEST(Samples, ChainOf) {
  const Tensor x = torch::randn({3, 4});
#include "samples/chain-of.cpp"
  EXPECT_EQ(chain.size(), 5);
}

TEST(Samples, ChainWithLoss) {
  const auto model = std::make_shared<Net>();
#include "samples/chain-with-loss.cpp"
  const Tensors out =
      chain.forward({torch::randn({3, 4}), torch::randn({3, 1})},
                    make_schedule("all", chain.size()));
  EXPECT_EQ(out[0].dim(), 0);
}

TEST(Samples, Checkpoint) {
  Block block;
  torch::nn::Linear qkv_linear(kWidth, 3 * kWidth);
  const auto attend = [](const Tensor& left, const Tensor& right) {
    return torch::matmul(left, right.t()).softmax(1);
  };
  const Tensor x = torch::randn({3, kWidth}).requires_grad_();
  const Tensor a = torch::randn({3, 4}), b = torch::randn({5, 4});
#include "samples/checkpoint.cpp"
  (y.sum() + z.sum() + qkv.sum()).backward();
  EXPECT_TRUE(has_gradients(block->parameters()));
  EXPECT_TRUE(has_gradients({x}));
}

TEST(Samples, RemedyCheckpoint) {
  Block block;
  const Tensor x = torch::randn({3, kWidth});
#include "samples/remedy-checkpoint.cpp"
  EXPECT_TRUE(y.equal(block(x)));
}

TEST(Samples, Solver) {
  Chain chain = Chain::of(Block(), Block(), Block());
  const Tensor x = torch::randn({3, kWidth}).requires_grad_();
#include "samples/solver.cpp"
  EXPECT_EQ(y.sizes(), x.sizes());
}

/// A window of two micro-batches, and what the samples call on it.
struct Window {
  std::vector<Tensors> window = {{torch::randn({2, kWidth})},
                                 {torch::randn({3, kWidth})}};
  Block model;
  torch::optim::SGD optimizer{model->parameters(), 0.1};
  static constexpr double kTokens = 5;

  Tensor loss_sum(const Tensors& micro) {
    return model(micro[0]).square().sum();
  }
  static double tokens(const Tensors& micro) {
    return static_cast<double>(micro[0].size(0));
  }
};

struct AccumulatorSample : Window {
  void run() {
    const double tokens_in_window = kTokens;
#include "samples/accumulator.cpp"
  }
};

struct AccumulateRemedy : Window {
  void run() {
    const double tokens_in_window = kTokens;
#include "samples/remedy-accumulate.cpp"
  }
};

TEST(Samples, Accumulator) {
  AccumulatorSample sample;
  const Tensor before = sample.model->linear->weight.clone();
  sample.run();
  EXPECT_FALSE(sample.model->linear->weight.equal(before));
  AccumulateRemedy remedy;
  const Tensor weight = remedy.model->linear->weight.clone();
  remedy.run();
  EXPECT_FALSE(remedy.model->linear->weight.equal(weight));
}

TEST(Samples, Meter) {
  const torch::Device device = torch::kCPU;
  Tensor kept;
  const auto step = [&] { kept = torch::zeros({1 << 20}); };
#include "samples/meter.cpp"
  EXPECT_GE(meter.peak_increase_bytes(), 4 << 20);
}

TEST(Samples, Model) {
  const auto net = std::make_shared<Net>();
#include "samples/model.cpp"
  EXPECT_EQ(model.chain.size(), 6);
}

/// The get() of own-model.md.
struct Words : Dataset {
  int64_t size() const override { return 4; }
  std::string description() const override { return "words"; }
#include "samples/get.cpp"

  Tensor words_ = torch::arange(12).view({4, 3});
  Tensor mask_ = words_.remainder(2), tags_ = words_.remainder(5);
};

TEST(Samples, Get) {
  const Batch batch = Words().get({2, 0});
  EXPECT_EQ(batch.tensors.size(), 3U);
  EXPECT_EQ(batch.samples, 2);
  EXPECT_EQ(batch.count, 2);  // 7 and 1 are odd, and 6, 8, 0, 2 are not
}

TEST(Samples, Trainer) {
  const InTemporaryDirectory here;
  const std::string device = "cpu";
#include "samples/trainer.cpp"
  EXPECT_TRUE(std::filesystem::exists("run/summary.json"));
}

TEST(Samples, RunTraining) {
  const InTemporaryDirectory here;
  static constexpr auto make_model = make_net_model;
#include "samples/run-training.cpp"
  EXPECT_TRUE(std::filesystem::exists("run/summary.json"));
#include "samples/groups.cpp"
  ASSERT_EQ(options.optimizer.groups.size(), 1U);
  EXPECT_TRUE(options.optimizer.groups[0].contains("b", torch::zeros({3})));
}

TEST(Samples, Lora) {
  const InTemporaryDirectory here;
  Model model = make_model("llama-small", {.depth = 1, .seq = 16});
  export_weights(model, "model.safetensors");
  const auto train = [](const Model& adapted) {
    EXPECT_TRUE(adapted.root->parameters().size() > 0);
  };
#include "samples/lora.cpp"
  EXPECT_TRUE(std::filesystem::exists("adapter/adapter_config.json"));
}

TEST(Samples, PlannedLoop) {
  Model model = make_net_model();
  torch::optim::SGD optimizer(model.root->parameters(), 0.01);
  const std::vector<reprise::Batch> batches(2, Rows().get([] {
    std::vector<int64_t> rows(64);
    for (int64_t row = 0; row < 64; ++row) rows[row] = row;
    return rows;
  }()));
  const Tensor before = model.root->parameters()[0].clone();
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-variable"
#include "samples/planned-loop.cpp"
#pragma GCC diagnostic pop
  EXPECT_FALSE(model.root->parameters()[0].equal(before));
}

TEST(Samples, Regions) {
  using torch::nn::Conv2d;
  using torch::nn::Conv2dOptions;
  Conv2d down(Conv2dOptions(1, 4, 3).padding(1)),
      middle(Conv2dOptions(4, 4, 3).padding(1)),
      up(Conv2dOptions(8, 1, 3).padding(1));
  const auto pool = [](const Tensor& in) { return torch::max_pool2d(in, 2); };
  const Tensor x = torch::randn({2, 1, 8, 8});
#include "samples/regions.cpp"
  EXPECT_EQ(c.sizes(), x.sizes());
}

TEST(Samples, StudyFile) {
  EXPECT_EQ(read_sample_study("study.yaml").runs.size(), 21U);
}

}  // namespace
}  // namespace reprise::testing
