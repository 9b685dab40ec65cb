// Compiles and runs the samples in the comments of public headers, which
// scripts/extract_samples.py writes to samples/. scripts/check_docs.py fails if a header has
// a sample that is not included here.
#include "docs/sample_models.h"

#include <reprise/command.h>
#include <reprise/data/torch_data.h>
#include <reprise/study.h>

#include <gtest/gtest.h>
#include <torch/data/datasets/map.h>
#include <torch/data/datasets/mnist.h>
#include <torch/data/transforms/tensor.h>

#include <array>
#include <fstream>
#include <random>

// The library has these names for its own Precision.
namespace reprise::testing::own {
enum class Precision { kFp32, kBf16, kFp16 };
template <class E>
struct EnumText;
#include "samples/base-enum_text-1.cpp"
}  // namespace reprise::testing::own

namespace reprise::testing {
namespace {

using torch::Tensor;

Model make_mine(const ModelOptions& /*options*/) {
  return make_net_model();
}

std::shared_ptr<const Dataset> open_mine(const DataOptions& /*options*/) {
  return std::make_shared<Rows>();
}

namespace as_program {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#define main sample_main
#include "samples/command-1.cpp"
#undef main
#pragma GCC diagnostic pop
}  // namespace as_program

}  // namespace
}  // namespace reprise::testing

namespace {
void register_mine() {
  reprise::testing::as_program::register_mine();
}
}  // namespace
#include "samples/command-2.cpp"

namespace reprise::testing {
namespace {

TEST(HeaderSamples, EnumText) {
  EXPECT_EQ(own::EnumText<own::Precision>::names[1], "bf16");
}

TEST(HeaderSamples, Command) {
  EXPECT_STREQ(reprise_plugin.build, REPRISE_BUILD);
}

TEST(HeaderSamples, Accumulator) {
  Block model;
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const std::vector<Tensor> window = {torch::randn({2, kWidth}),
                                      torch::randn({3, kWidth})};
  const double tokens_in_window = 5;
  const auto loss_sum = [&](const Tensor& x) { return model(x).sum(); };
  const auto tokens = [](const Tensor& x) { return double(x.size(0)); };
#include "samples/accumulate-accumulator-1.cpp"
  EXPECT_EQ(accumulator.total_count(), 0);
}

TEST(HeaderSamples, Order) {
  const auto data = std::make_shared<Rows>();
  const auto sample = [&] {
    return
#include "samples/data-dataset-1.cpp"
  };
  EXPECT_EQ(sample()->epoch_size(), 1000);
}

/// Writes an IDX file of bytes, as large as torch::data's MNIST expects, mostly a hole.
void write_idx(const std::string& path, std::vector<uint8_t> sizes,
               uint64_t bytes) {
  std::ofstream out(path, std::ios::binary);
  const std::array<uint8_t, 4> magic{0, 0, 8,
                                     static_cast<uint8_t>(sizes.size() / 4)};
  out.write(reinterpret_cast<const char*>(magic.data()), 4);
  out.write(reinterpret_cast<const char*>(sizes.data()),
            static_cast<std::streamsize>(sizes.size()));
  out.close();
  std::filesystem::resize_file(path, 4 + sizes.size() + bytes);
}

TEST(HeaderSamples, TorchData) {
  const TemporaryDirectory directory;
  const std::string path = directory.path();
  const std::vector<uint8_t> count{0, 0, 0xEA, 0x60}, side{0, 0, 0, 28};
  std::vector<uint8_t> images_sizes = count;
  for (int i = 0; i < 2; ++i) {
    images_sizes.insert(images_sizes.end(), side.begin(), side.end());
  }
  write_idx(directory / "train-images-idx3-ubyte", images_sizes, 60000 * 784);
  write_idx(directory / "train-labels-idx1-ubyte", count, 60000);
  struct {
    TrainData data;
  } inputs;
#include "samples/data-torch_data-1.cpp"
  EXPECT_EQ(inputs.data.train->size(), 60000);
  EXPECT_EQ(inputs.data.train->get({0, 1}).samples, 2);
}

TEST(HeaderSamples, Memory) {
  Block model;
  const Tensor x = torch::randn({2, kWidth});
  const auto optimizer_state = [] { return std::vector<Tensor>{}; };
  {
#include "samples/memory-categories-1.cpp"
    EXPECT_GT(now[Category::kParameters], 0);
  }
  Block module = model;
  Tensor y;
#include "samples/memory-kept-1.cpp"
  EXPECT_GT(meter.live_bytes(), 0);
}

TEST(HeaderSamples, Meter) {
  const Tensor weight = torch::ones({1 << 20}).requires_grad_();
  const Tensor loss = weight.square().sum();
#include "samples/memory-meter-1.cpp"
  EXPECT_GE(meter.peak_increase_bytes(), 4 << 20);
}

TEST(HeaderSamples, Lora) {
  const InTemporaryDirectory here;
  export_weights(::reprise::make_model("llama-small", {.depth = 1}),
                 "Llama-3.2-1B");
  const auto make_model = [](const std::string& /*the original is large*/) {
    return ::reprise::make_model("llama-small", {.depth = 1});
  };
  const auto train = [](const Model&) {};
#include "samples/models-lora-1.cpp"
  EXPECT_TRUE(std::filesystem::exists("adapter/adapter_config.json"));
}

TEST(HeaderSamples, Model) {
  const auto net = std::make_shared<Net>();
#include "samples/models-model-1.cpp"
  EXPECT_EQ(model.chain.size(), 6);
}

TEST(HeaderSamples, Script) {
  const InTemporaryDirectory here;
  torch::jit::Module script("block");
  script.define("def forward(self, x):\n    return torch.relu(x)\n");
  script.save("block.pt");
  torch::nn::Linear head(4, 2);
#include "samples/models-script-1.cpp"
  EXPECT_EQ(
      chain.forward(torch::randn({3, 4}), make_schedule("all", 2)).size(1), 2);
}

TEST(HeaderSamples, Observer) {
  const auto make_model = [] {};
  const auto train = [] {};
  const auto evaluate = [] {};
  const auto observe = [&] {
#include "samples/observe-observer-1.cpp"
    return observed;
  };
  EXPECT_GE(observe().samples, 1);  // without the device, of the process
}

TEST(HeaderSamples, Norms) {
  torch::nn::LayerNorm first_norm(torch::nn::LayerNormOptions({kWidth})),
      second_norm(torch::nn::LayerNormOptions({kWidth}));
  const auto attention = [](const Tensor& in) { return in.softmax(1); };
  const auto feed_forward = [](const Tensor& in) { return in.tanh(); };
  const auto pre_norm = [&](const Tensor& x) {
#include "samples/ops-norm-1.cpp"
  };
  const auto post_norm = [&](const Tensor& x) {
#include "samples/ops-norm-2.cpp"
  };
  const Tensor x = torch::randn({3, kWidth});
  EXPECT_EQ(pre_norm(x).sizes(), x.sizes());
  EXPECT_EQ(post_norm(x).sizes(), x.sizes());
}

TEST(HeaderSamples, NormAct) {
  torch::nn::BatchNorm2d norm(4), last(4);
  torch::nn::Conv2d conv(torch::nn::Conv2dOptions(4, 4, 3).padding(1));
  const auto block = [&](Tensor x, const Tensor& shortcut) {
#include "samples/ops-norm-3.cpp"
  };
  const Tensor x = torch::randn({2, 4, 5, 5});
  EXPECT_EQ(block(x, x).sizes(), x.sizes());
}

TEST(HeaderSamples, WeightCopies) {
  torch::nn::Linear linear(4, 4);
  const std::vector<Tensor> weights = {linear->weight};
  const std::vector<std::vector<Tensor>> windows(
      2, {torch::randn({2, 4}), torch::randn({3, 4})});
  const auto loss_of = [&](const Tensor& micro_batch) {
    return ops::linear(micro_batch, linear->weight).square().sum();
  };
  int updates = 0;
  const auto update = [&] { ++updates; };
#include "samples/ops-weight_copies-1.cpp"
  EXPECT_EQ(updates, 2);
  EXPECT_TRUE(has_gradients(weights));
}

TEST(HeaderSamples, Chain) {
  torch::nn::Sequential sequential(torch::nn::Linear(4, 8));
  Block embed, block, head;
  const auto f = [](const Tensor& x) { return x.tanh(); };
  const auto g = [](const Tensor& x) { return x.exp(); };
#include "samples/recompute-chain-1.cpp"
  EXPECT_EQ(chain.size(), 2);
}

TEST(HeaderSamples, ChainOf) {
  const auto model = std::make_shared<Net>();
#include "samples/recompute-chain_of-1.cpp"
  EXPECT_EQ(chain.size(), 6);
}

TEST(HeaderSamples, Checkpoint) {
  Block block;
  const auto attend = [](const Tensor& left, const Tensor& right) {
    return torch::matmul(left, right.t()).softmax(1);
  };
  const Tensor x = torch::randn({3, kWidth});
  const Tensor a = torch::randn({3, 4}), b = torch::randn({5, 4});
#include "samples/recompute-checkpoint-1.cpp"
  y.sum().backward();
  EXPECT_TRUE(has_gradients(block->parameters()));
  EXPECT_EQ(z.size(1), 5);
}

TEST(HeaderSamples, RecomputeSaved) {
  torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({kWidth}));
  const Tensor weight = torch::randn({4, kWidth}).requires_grad_();
  const auto layer = [&](const Tensor& x, const Tensor& branch) {
#include "samples/recompute-checkpoint-2.cpp"
  };
  layer(torch::randn({3, kWidth}), torch::randn({3, kWidth})).sum().backward();
  EXPECT_TRUE(has_gradients({weight}));
}

TEST(HeaderSamples, Execution) {
  const auto net = std::make_shared<Net>();
  Chain chain = net->chain();
  const Schedule schedule = make_schedule("all", chain.size());
  const Tensor images = torch::randn({3, 4}), targets = torch::randn({3, 1});
#include "samples/recompute-execution-1.cpp"
  EXPECT_TRUE(has_gradients(net->parameters()));
}

TEST(HeaderSamples, HostMemory) {
  Chain chain = Chain::of(Block(), Block());
  const auto sample = [&] {
#include "samples/recompute-host_memory-1.cpp"
  };
  if (at::hasCUDA()) {
    sample();
    EXPECT_EQ(chain.size(), 2);
  } else {
    EXPECT_THROW(sample(), c10::Error);
  }
}

TEST(HeaderSamples, Keep) {
  Block norm, project;
  torch::nn::Linear qkv_linear(kWidth, kWidth);
  const auto attend = [](const Tensor& in) { return in.softmax(1); };
  const Tensor x = torch::randn({3, kWidth}).requires_grad_();
  const auto sample = [&] {
    return
#include "samples/recompute-keep-1.cpp"
  };
  sample().sum().backward();
  EXPECT_TRUE(has_gradients(qkv_linear->parameters()));
}

TEST(HeaderSamples, Region) {
  using torch::nn::Conv2d;
  using torch::nn::Conv2dOptions;
  Conv2d down(Conv2dOptions(1, 4, 3).padding(1)),
      middle(Conv2dOptions(4, 4, 3).padding(1)),
      up(Conv2dOptions(8, 1, 3).padding(1));
  const auto pool = [](const Tensor& in) { return torch::max_pool2d(in, 2); };
  const auto loss = [](const Tensor& a, const Tensor& b) {
    return sum_of_squares(a, b);
  };
  const auto net = std::make_shared<torch::nn::Module>();
  net->register_module("down", down.ptr());
  net->register_module("middle", middle.ptr());
  net->register_module("up", up.ptr());
  const Tensors batch = {torch::randn({2, 1, 8, 8}),
                         torch::randn({2, 1, 8, 8})};
#include "samples/recompute-region-1.cpp"
  EXPECT_GT(chain[0].variants().size(), 0U);
}

TEST(HeaderSamples, OwnLoop) {
  Model model = make_net_model();
  torch::optim::SGD optimizer(model.root->parameters(), 0.01);
  Batch batch = Rows().get({0, 1, 2, 3, 4, 5, 6, 7});
  batch.count = 64;
  for (Tensor& tensor : batch.tensors) tensor = tensor.repeat({8, 1});
  int left = 2;
  const auto read_next = [&](const Batch&) { return left-- > 0; };
  const auto make = [](const NamedTensors& parameters) {
    return make_optimizer({.name = "sgd"}, parameters);
  };
  const Tensor before = model.root->parameters()[0].clone();
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-variable"
#include "samples/train-own_loop-1.cpp"
#pragma GCC diagnostic pop
  EXPECT_FALSE(model.root->parameters()[0].equal(before));
}

TEST(HeaderSamples, Scaler) {
  const Tensor weight = torch::ones({2}).requires_grad_();
  const std::vector<Tensor> parameters = {weight};
  torch::optim::SGD optimizer(parameters, 1);
  GradScaler scaler;
  const Tensor loss = weight.sum();
#include "samples/train-scaler-1.cpp"
  EXPECT_TRUE(weight.equal(torch::zeros({2})));
}

TEST(HeaderSamples, StudyFile) {
  EXPECT_EQ(read_sample_study("study-study_file-1.yaml").runs.size(), 24U);
}

TEST(HeaderSamples, Trainer) {
  const Model model = make_net_model();
  const auto dataset = std::make_shared<Rows>();
#include "samples/train-trainer-1.cpp"
  EXPECT_TRUE(result.summary.loss.has_value());
}

}  // namespace
}  // namespace reprise::testing
