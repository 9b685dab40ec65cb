#pragma once

#include "libtorch.h"
#include "temporary.h"

#include <reprise/study.h>
#include <reprise/train.h>

#include <torch/nn/functional/loss.h>
#include <torch/nn/functional/upsampling.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/sgd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

/// Models and data of the kind that the samples of the pages use.
namespace reprise::testing {

constexpr int64_t kWidth = 8;

/// A block of a residual network.
struct BlockImpl : torch::nn::Module {
  BlockImpl() { register_module("linear", linear); }
  torch::Tensor forward(const torch::Tensor& x) {
    return x + torch::gelu(linear(x));
  }
  torch::nn::Linear linear{kWidth, kWidth};
};
TORCH_MODULE(Block);

inline torch::Tensor sum_of_squares(const torch::Tensor& scores,
                                    const torch::Tensor& targets) {
  return (scores - targets).square().sum();
}

/// embed, layers in turn, head.
struct Net : torch::nn::Module {
  Net() {
    register_module("embed", embed);
    register_module("layers", layers);
    register_module("head", head);
    for (int i = 0; i < 3; ++i) layers->push_back(Block());
  }

  /// Maps {x, targets} to the sum of the losses.
  Chain chain() {
    return chain_of<BlockImpl>(
        *this, {"embed", "layers.*", "head", {"loss", sum_of_squares}});
  }

  torch::nn::Linear embed{4, kWidth}, head{kWidth, 1};
  torch::nn::ModuleList layers;
};

/// 128 samples for a Net.
struct Rows : Dataset {
  int64_t size() const override { return x.size(0); }
  Batch get(const std::vector<int64_t>& indices) const override {
    const torch::Tensor rows = torch::tensor(indices);
    return {.tensors = {x.index_select(0, rows), y.index_select(0, rows)},
            .samples = rows.size(0),
            .count = rows.size(0)};
  }
  std::string description() const override { return "rows"; }

  torch::Tensor x = torch::randn({128, 4});
  torch::Tensor y = x.sum(1, true);
};

inline torch::Tensor loss_sum(const torch::Tensor& scores,
                              const torch::Tensor& targets) {
  return sum_of_squares(scores, targets);
}

/// Twice as many rows and columns.
inline torch::Tensor upsample(const torch::Tensor& x) {
  return torch::upsample_nearest2d(x, {x.size(2) * 2, x.size(3) * 2});
}

inline Model make_net_model() {
  const auto net = std::make_shared<Net>();
  return {.name = "own", .root = net, .chain = net->chain()};
}

/// Changes into a temporary directory, and back at the end of the test.
class InTemporaryDirectory {
 public:
  InTemporaryDirectory() : before_(std::filesystem::current_path()) {
    std::filesystem::current_path(directory_.path());
  }
  ~InTemporaryDirectory() { std::filesystem::current_path(before_); }
  InTemporaryDirectory(const InTemporaryDirectory&) = delete;
  InTemporaryDirectory& operator=(const InTemporaryDirectory&) = delete;

 private:
  TemporaryDirectory directory_;
  std::filesystem::path before_;
};

/// Parses a study that is a sample of a page or of a header; `file` is in samples/.
inline Study read_sample_study(const std::string& file) {
  std::stringstream text;
  text << std::ifstream(REPRISE_SAMPLES "/samples/" + file).rdbuf();
  std::vector<std::string> flags;
  for (const auto& field : config_fields()) flags.push_back(field.name);
  return read_study(text.str(), "sample", flags);
}

/// The gradients of `parameters` are all defined and finite.
inline bool has_gradients(const std::vector<torch::Tensor>& parameters) {
  for (const torch::Tensor& parameter : parameters) {
    if (!parameter.grad().defined() ||
        !parameter.grad().isfinite().all().item<bool>()) {
      return false;
    }
  }
  return true;
}

}  // namespace reprise::testing
