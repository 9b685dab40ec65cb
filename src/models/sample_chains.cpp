// Tested by tests/verify/verify_test.cpp.
#include <reprise/models/model.h>
#include <reprise/recompute/checkpoint.h>

#include <torch/nn.h>
#include <torch/nn/functional.h>

#include <cmath>

namespace reprise {
namespace {

namespace F = torch::nn::functional;
using torch::Tensor;

/// {scores, targets} → {sum of losses, count}
Tensors cross_entropy_sum(const Tensor& scores, const Tensor& targets) {
  const Tensor loss = F::cross_entropy(
      scores, targets, F::CrossEntropyFuncOptions().reduction(torch::kSum));
  return {loss, torch::full({}, static_cast<double>(targets.numel()),
                            scores.options().requires_grad(false))};
}

/// `function(x)`, inside checkpoint() with `nested_checkpoint`.
template <class Fn>
Tensor maybe_checkpoint(const SampleChainOptions& options, Fn function,
                        const Tensor& x) {
  return options.nested_checkpoint ? checkpoint(function, x) : function(x);
}

void to_device(const std::vector<Stage>& stages, torch::Device device) {
  for (const Stage& stage : stages) {
    for (const auto& module : stage.modules()) module->to(device);
  }
}

// --- tiny-mlp --------------------------------------------------------------

Chain make_mlp(const SampleChainOptions& options) {
  constexpr int64_t kWidth = 32;
  std::vector<Stage> stages;
  for (int i = 0; i < 6; ++i) {
    torch::nn::Linear linear(kWidth, kWidth);
    torch::nn::Dropout dropout(0.2);
    auto layer = [options, linear, dropout](const Tensor& x) mutable {
      return maybe_checkpoint(
          options,
          [linear, dropout](const Tensor& t) mutable {
            return dropout(torch::relu(linear(t)));
          },
          x);
    };
    stages.push_back(make_stage("hidden" + std::to_string(i), layer,
                                {linear.ptr(), dropout.ptr()})
                         .on_first());
  }
  stages.push_back(
      make_stage("head", torch::nn::Linear(kWidth, 10)).on_first());
  stages.push_back(make_stage("loss", cross_entropy_sum));
  to_device(stages, options.device);
  return Chain(std::move(stages));
}

Tensors mlp_inputs(const SampleChainOptions& options) {
  return {torch::randn({options.batch, 32}, options.device),
          torch::randint(10, {options.batch},
                         torch::dtype(torch::kLong).device(options.device))};
}

// --- tiny-cnn --------------------------------------------------------------

Chain make_cnn(const SampleChainOptions& options) {
  std::vector<Stage> stages;
  int64_t channels = 3;
  for (const int64_t next : {8, 8, 16, 16}) {
    torch::nn::Sequential block(
        torch::nn::Conv2d(
            torch::nn::Conv2dOptions(channels, next, 3).padding(1)),
        torch::nn::BatchNorm2d(next), torch::nn::ReLU());
    auto layer = [options, block](const Tensor& x) mutable {
      return maybe_checkpoint(
          options,
          [block](const Tensor& t) mutable { return block->forward(t); }, x);
    };
    stages.push_back(make_stage("block" + std::to_string(stages.size()), layer,
                                {block.ptr()})
                         .on_first());
    channels = next;
  }
  torch::nn::Linear head(channels, 10);
  stages.push_back(make_stage("head",
                              [head](const Tensor& x) mutable {  // (B, C, H, W)
                                return head(x.mean({2, 3}));
                              },
                              {head.ptr()})
                       .on_first());
  stages.push_back(make_stage("loss", cross_entropy_sum));
  to_device(stages, options.device);
  return Chain(std::move(stages));
}

Tensors cnn_inputs(const SampleChainOptions& options) {
  return {torch::randn({options.batch, 3, 12, 12}, options.device),
          torch::randint(10, {options.batch},
                         torch::dtype(torch::kLong).device(options.device))};
}

// --- tiny-transformer ------------------------------------------------------

constexpr int64_t kVocabulary = 50;
constexpr int64_t kSequence = 16;
constexpr int64_t kModel = 32;
constexpr int64_t kHeads = 4;

/// Pre-norm block with causal attention.
struct TinyBlockImpl : torch::nn::Module {
  explicit TinyBlockImpl(bool nested)
      : nested_checkpoint(nested),
        norm1(register_module("norm1", make_norm())),
        qkv(register_module("qkv", Linear(kModel, 3 * kModel))),
        project(register_module("project", Linear(kModel, kModel))),
        norm2(register_module("norm2", make_norm())),
        up(register_module("up", Linear(kModel, 4 * kModel))),
        down(register_module("down", Linear(4 * kModel, kModel))),
        dropout(register_module("dropout", torch::nn::Dropout(0.1))) {}

  Tensor attend(const Tensor& x) {  // (B, T, C)
    const auto parts = qkv(norm1(x)).chunk(3, -1);
    const auto split = [&](const Tensor& t) {
      return t.view({x.size(0), x.size(1), kHeads, kModel / kHeads})
          .transpose(1, 2);
    };
    const double scale = 1.0 / std::sqrt(double{kModel} / kHeads);
    const Tensor future =
        torch::ones({x.size(1), x.size(1)}, x.options().dtype(torch::kBool))
            .triu(1);
    const Tensor scores =
        torch::matmul(split(parts[0]), split(parts[1]).transpose(-2, -1))
            .mul(scale)
            .masked_fill(future, -1e9);
    const Tensor mixed =
        torch::matmul(dropout(torch::softmax(scores, -1)), split(parts[2]));
    return dropout(project(mixed.transpose(1, 2).reshape(x.sizes())));
  }

  Tensor feed(const Tensor& x) {
    return dropout(down(torch::gelu(up(norm2(x)))));
  }

  Tensor forward(const Tensor& x) {
    const Tensor y = x + attend(x);
    if (!nested_checkpoint) return y + feed(y);
    return y + checkpoint([this](const Tensor& t) { return feed(t); }, y);
  }

  static torch::nn::LayerNorm make_norm() {
    return torch::nn::LayerNorm(torch::nn::LayerNormOptions({kModel}));
  }

  using LayerNorm = torch::nn::LayerNorm;
  using Linear = torch::nn::Linear;
  bool nested_checkpoint;
  LayerNorm norm1;
  Linear qkv, project;
  LayerNorm norm2;
  Linear up, down;
  torch::nn::Dropout dropout;
};
TORCH_MODULE(TinyBlock);

Chain make_transformer(const SampleChainOptions& options) {
  torch::nn::Embedding tokens(kVocabulary, kModel);
  torch::nn::Embedding positions(kSequence, kModel);
  torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({kModel}));
  std::vector<Stage> stages;
  stages.push_back(make_stage("embed",
                              [tokens, positions](const Tensor& ids) mutable {
                                const Tensor places =
                                    torch::arange(ids.size(1), ids.options());
                                return tokens(ids) + positions(places);
                              },
                              {tokens.ptr(), positions.ptr()})
                       .on_first());
  for (int i = 0; i < 4; ++i) {
    stages.push_back(make_stage("block" + std::to_string(i),
                                TinyBlock(options.nested_checkpoint))
                         .on_first());
  }
  // The output layer shares the weight of the embedding.
  stages.push_back(make_stage("head",
                              [tokens, norm](const Tensor& x) mutable {
                                return torch::matmul(norm(x),
                                                     tokens->weight.t());
                              },
                              {tokens.ptr(), norm.ptr()})
                       .on_first());
  stages.push_back(
      make_stage("loss", [](const Tensor& scores, const Tensor& targets) {
        return cross_entropy_sum(scores.flatten(0, 1), targets.flatten());
      }));
  to_device(stages, options.device);
  return Chain(std::move(stages));
}

Tensors transformer_inputs(const SampleChainOptions& options) {
  const auto type = torch::dtype(torch::kLong).device(options.device);
  return {torch::randint(kVocabulary, {options.batch, kSequence}, type),
          torch::randint(kVocabulary, {options.batch, kSequence}, type)};
}

// --- tiny-skip -------------------------------------------------------------

/// A small U-Net. Stages pass on the image, the mask of pixels that count, the targets, and
/// the skip connections that are open.
Chain make_skip(const SampleChainOptions& options) {
  const auto conv = [](int64_t from, int64_t to) {
    return torch::nn::Sequential(
        torch::nn::Conv2d(torch::nn::Conv2dOptions(from, to, 3).padding(1)),
        torch::nn::BatchNorm2d(to), torch::nn::ReLU());
  };
  std::vector<Stage> stages;
  int64_t channels = 1;
  for (const int64_t next : {8, 16}) {
    auto block = conv(channels, next);
    stages.push_back(make_stage(
        "down" + std::to_string(next),
        [options, block](const Tensors& in) mutable -> Tensors {
          const Tensor skip = maybe_checkpoint(
              options,
              [block](const Tensor& t) mutable { return block->forward(t); },
              in[0]);
          Tensors out = in;
          out[0] = torch::max_pool2d(skip, 2);
          out.push_back(skip);
          return out;
        },
        {block.ptr()}));
    channels = next;
  }
  auto middle = conv(channels, channels);
  torch::nn::Dropout2d dropout(0.1);
  stages.push_back(make_stage("middle",
                              [middle, dropout](const Tensor& x) mutable {
                                return dropout(middle->forward(x));
                              },
                              {middle.ptr(), dropout.ptr()})
                       .on_first());
  for (const int64_t next : {8, 4}) {
    const int64_t skipped = next == 8 ? 16 : 8;
    auto block = conv(channels + skipped, next);
    stages.push_back(make_stage(
        "up" + std::to_string(next),
        [block](const Tensors& in) mutable -> Tensors {
          const Tensor larger =
              F::interpolate(in[0], F::InterpolateFuncOptions()
                                        .scale_factor(std::vector<double>{2, 2})
                                        .mode(torch::kNearest));
          Tensors out(in.begin(), in.end() - 1);
          out[0] = block->forward(torch::cat({larger, in.back()}, 1));
          return out;
        },
        {block.ptr()}));
    channels = next;
  }
  torch::nn::Conv2d head(torch::nn::Conv2dOptions(channels, 1, 1));
  stages.push_back(make_stage("head", head).on_first());
  stages.push_back(make_stage(
      "loss", [](const Tensor& x, const Tensor& mask, const Tensor& target) {
        return Tensors{((x - target).square() * mask).sum(), mask.sum()};
      }));
  to_device(stages, options.device);
  return Chain(std::move(stages));
}

Tensors skip_inputs(const SampleChainOptions& options) {
  const torch::TensorOptions type(options.device);
  return {
      torch::randn({options.batch, 1, 16, 16}, type),
      torch::rand({options.batch, 1, 16, 16}, type).gt(0.3).to(torch::kFloat),
      torch::randn({options.batch, 1, 16, 16}, type)};
}

}  // namespace

const std::vector<SampleChain>& sample_chains() {
  static const std::vector<SampleChain> all = {
      {"tiny-mlp", "8 stages, dropout", make_mlp, mlp_inputs},
      {"tiny-cnn", "6 stages, BatchNorm", make_cnn, cnn_inputs},
      {"tiny-transformer", "7 stages, dropout, tied weights", make_transformer,
       transformer_inputs},
      {"tiny-skip", "7 stages, skip connections and a mask, BatchNorm",
       make_skip, skip_inputs},
  };
  return all;
}

}  // namespace reprise
