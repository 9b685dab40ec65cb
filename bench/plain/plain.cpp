// Six models of plain LibTorch layers, none of them ours, as a plug-in for bench/gpu.py --plain.
// bench/peers/plain.py has the same models in Python, with the same names of parameters.
#include <reprise/command.h>
#include <reprise/recompute/chain_of.h>

#include <torch/nn/functional.h>
#include <torch/nn/modules.h>

namespace {

using reprise::Model;
using reprise::ModelOptions;
using torch::Tensor;
using torch::nn::BatchNorm2d;
using torch::nn::Conv2d;
using torch::nn::Conv2dOptions;
using torch::nn::Embedding;
using torch::nn::LayerNorm;
using torch::nn::LayerNormOptions;
using torch::nn::Linear;
namespace F = torch::nn::functional;

Conv2d make_conv(int64_t from, int64_t to, int64_t kernel, int64_t groups = 1) {
  return Conv2d(Conv2dOptions(from, to, kernel)
                    .padding(kernel / 2)
                    .groups(groups)
                    .bias(false));
}

LayerNorm make_norm(int64_t width) {
  return LayerNorm(LayerNormOptions({width}));
}

struct FlatLinearImpl : torch::nn::Module {
  FlatLinearImpl(int64_t inputs, int64_t width)
      : linear(register_module("linear", Linear(inputs, width))) {}
  Tensor forward(const Tensor& x) { return linear(x.flatten(1)); }
  Linear linear;
};
TORCH_MODULE(FlatLinear);

struct MlpBlockImpl : torch::nn::Module {
  explicit MlpBlockImpl(int64_t width)
      : linear(register_module("linear", Linear(width, width))),
        norm(register_module("norm", make_norm(width))) {}
  Tensor forward(const Tensor& x) { return x + torch::gelu(norm(linear(x))); }
  Linear linear;
  LayerNorm norm;
};
TORCH_MODULE(MlpBlock);

struct ConvStemImpl : torch::nn::Module {
  ConvStemImpl(int64_t channels, int64_t width)
      : conv(register_module("conv", make_conv(channels, width, 3))),
        norm(register_module("norm", BatchNorm2d(width))) {}
  Tensor forward(const Tensor& x) { return torch::relu(norm(conv(x))); }
  Conv2d conv;
  BatchNorm2d norm;
};
TORCH_MODULE(ConvStem);

struct ResidualBlockImpl : torch::nn::Module {
  explicit ResidualBlockImpl(int64_t width)
      : conv1(register_module("conv1", make_conv(width, width, 3))),
        norm1(register_module("norm1", BatchNorm2d(width))),
        conv2(register_module("conv2", make_conv(width, width, 3))),
        norm2(register_module("norm2", BatchNorm2d(width))) {}
  Tensor forward(const Tensor& x) {
    const Tensor y = torch::relu(norm1(conv1(x)));
    return torch::relu(x + norm2(conv2(y)));
  }
  Conv2d conv1;
  BatchNorm2d norm1;
  Conv2d conv2;
  BatchNorm2d norm2;
};
TORCH_MODULE(ResidualBlock);

struct SeparableBlockImpl : torch::nn::Module {
  explicit SeparableBlockImpl(int64_t width)
      : depthwise(
            register_module("depthwise", make_conv(width, width, 3, width))),
        norm1(register_module("norm1", BatchNorm2d(width))),
        pointwise(register_module("pointwise", make_conv(width, width, 1))),
        norm2(register_module("norm2", BatchNorm2d(width))) {}
  Tensor forward(const Tensor& x) {
    const Tensor y = torch::silu(norm1(depthwise(x)));
    return torch::silu(norm2(pointwise(y)));
  }
  Conv2d depthwise;
  BatchNorm2d norm1;
  Conv2d pointwise;
  BatchNorm2d norm2;
};
TORCH_MODULE(SeparableBlock);

/// Classes from the mean over the pixels of (N, width, S, S).
struct PooledLinearImpl : torch::nn::Module {
  PooledLinearImpl(int64_t width, int64_t classes)
      : linear(register_module("linear", Linear(width, classes))) {}
  Tensor forward(const Tensor& x) { return linear(x.mean({2, 3})); }
  Linear linear;
};
TORCH_MODULE(PooledLinear);

/// Tokens (N, T) to (T, N, width), as LibTorch's layers for sequences take them.
struct EmbeddedImpl : torch::nn::Module {
  explicit EmbeddedImpl(const ModelOptions& options)
      : tokens(
            register_module("tokens", Embedding(options.vocab, options.width))),
        places(
            register_module("places", Embedding(options.seq, options.width))) {}
  Tensor forward(const Tensor& x) {
    return (tokens(x) + places->weight.narrow(0, 0, x.size(1))).transpose(0, 1);
  }
  Embedding tokens, places;
};
TORCH_MODULE(Embedded);

struct LstmBlockImpl : torch::nn::Module {
  explicit LstmBlockImpl(int64_t width)
      : norm(register_module("norm", make_norm(width))),
        lstm(register_module("lstm", torch::nn::LSTM(width, width))) {}
  Tensor forward(const Tensor& x) { return x + std::get<0>(lstm(norm(x))); }
  LayerNorm norm;
  torch::nn::LSTM lstm;
};
TORCH_MODULE(LstmBlock);

/// LibTorch's layer, without a mask.
struct EncoderBlockImpl : torch::nn::TransformerEncoderLayerImpl {
  EncoderBlockImpl(int64_t width, int64_t heads)
      : TransformerEncoderLayerImpl(
            torch::nn::TransformerEncoderLayerOptions(width, heads)
                .dim_feedforward(4 * width)
                .dropout(0)) {}
  Tensor forward(const Tensor& x) {
    return TransformerEncoderLayerImpl::forward(x);
  }
};
TORCH_MODULE(EncoderBlock);

/// Classes from the mean over the tokens of (T, N, width).
struct MeanLinearImpl : torch::nn::Module {
  MeanLinearImpl(int64_t width, int64_t classes)
      : linear(register_module("linear", Linear(width, classes))) {}
  Tensor forward(const Tensor& x) { return linear(x.mean(0)); }
  Linear linear;
};
TORCH_MODULE(MeanLinear);

template <class Conv, class Options>
struct ScaledBlockImpl : torch::nn::Module {
  ScaledBlockImpl(int64_t from, int64_t to)
      : conv(register_module(
            "conv", Conv(Options(from, to, 4).stride(2).padding(1)))) {}
  Tensor forward(const Tensor& x) {
    return torch::leaky_relu(conv->forward(x), 0.1);
  }
  Conv conv;
};
using DownBlockImpl = ScaledBlockImpl<Conv2d, Conv2dOptions>;
using UpBlockImpl = ScaledBlockImpl<torch::nn::ConvTranspose2d,
                                    torch::nn::ConvTranspose2dOptions>;

Tensor class_loss(const Tensor& scores, const Tensor& targets) {
  return F::cross_entropy(scores.to(torch::kFloat), targets,
                          F::CrossEntropyFuncOptions().reduction(torch::kSum));
}

/// A model of `stem`, `blocks` and `head`, one after the other.
struct Net {
  std::shared_ptr<torch::nn::Module> root =
      std::make_shared<torch::nn::Module>();
  torch::nn::ModuleList blocks =
      root->register_module("blocks", torch::nn::ModuleList());

  template <class... Types>
  Model classifier() const {
    return {.root = root,
            .chain = reprise::chain_of<Types...>(
                *root, {"stem", "blocks.*", "head", {"loss", class_loss}})};
  }
};

Model make_mlp(const ModelOptions& options) {
  Net net;
  const int64_t inputs =
      options.channels * options.image_size * options.image_size;
  net.root->register_module("stem", FlatLinear(inputs, options.width));
  for (int64_t i = 0; i < options.depth; ++i) {
    net.blocks->push_back(MlpBlock(options.width));
  }
  net.root->register_module("head", Linear(options.width, options.classes));
  return net.classifier<FlatLinear, MlpBlock>();
}

template <class Block>
Model make_network(const ModelOptions& options) {
  Net net;
  net.root->register_module("stem", ConvStem(options.channels, options.width));
  for (int64_t i = 0; i < options.depth; ++i) {
    net.blocks->push_back(Block(options.width));
  }
  net.root->register_module("head",
                            PooledLinear(options.width, options.classes));
  return net.classifier<ConvStem, Block, PooledLinear>();
}

Model make_text(const ModelOptions& options) {
  Net net;
  net.root->register_module("stem", Embedded(options));
  for (int64_t i = 0; i < options.depth; ++i) {
    net.blocks->push_back(LstmBlock(options.width));
  }
  net.root->register_module("head", MeanLinear(options.width, options.classes));
  return net.classifier<Embedded, LstmBlock, MeanLinear>();
}

Model make_encoder(const ModelOptions& options) {
  Net net;
  net.root->register_module("stem", Embedded(options));
  for (int64_t i = 0; i < options.depth; ++i) {
    net.blocks->push_back(EncoderBlock(options.width, options.heads));
  }
  net.root->register_module("head", MeanLinear(options.width, options.classes));
  return net.classifier<Embedded, EncoderBlock, MeanLinear>();
}

/// The loss of an image is the mean square of its difference from the input, which the
/// stages pass on instead of the classes.
Model make_autoencoder(const ModelOptions& options) {
  Net net;
  const auto conv = [](int64_t from, int64_t to) {
    return Conv2d(Conv2dOptions(from, to, 3).padding(1));
  };
  const int64_t width = options.width;
  net.root->register_module("stem", conv(options.channels, width));
  for (int64_t i = 0; i < options.depth; ++i) {
    net.blocks->push_back(
        std::make_shared<DownBlockImpl>(width << i, width << (i + 1)));
  }
  for (int64_t i = options.depth - 1; i >= 0; --i) {
    net.blocks->push_back(
        std::make_shared<UpBlockImpl>(width << (i + 1), width << i));
  }
  net.root->register_module("head", conv(width, options.channels));
  const auto keep_input = [](const Tensor& x, const Tensor&) {
    return reprise::Tensors{x, x};
  };
  const auto loss = [](const Tensor& output, const Tensor& input) {
    return (output.to(torch::kFloat) - input).square().mean({1, 2, 3}).sum();
  };
  return {
      .root = net.root,
      .chain = reprise::chain_of<DownBlockImpl, UpBlockImpl>(
          *net.root,
          {{"input", keep_input}, "stem", "blocks.*", "head", {"loss", loss}})};
}

ModelOptions image_options(int64_t size, int64_t channels, int64_t depth,
                           int64_t width) {
  ModelOptions options;
  options.image_size = size;
  options.channels = channels;
  options.classes = 10;
  options.depth = depth;
  options.width = width;
  return options;
}

ModelOptions text_options(int64_t depth, int64_t heads) {
  ModelOptions options;
  options.depth = depth;
  options.width = 512;
  options.heads = heads;
  options.vocab = 8192;
  options.seq = 256;
  options.classes = 10;
  return options;
}

void register_plain() {
  using reprise::Task;
  const auto add = [](const char* name, const char* description, Task task,
                      const ModelOptions& defaults, auto make) {
    reprise::register_model({.name = name,
                             .description = description,
                             .task = task,
                             .defaults = defaults,
                             .make = make});
  };
  add("plain-mlp", "linear layers with LayerNorm and GELU", Task::kImages,
      image_options(28, 1, 12, 1024), make_mlp);
  add("plain-resnet", "residual convolutions with BatchNorm", Task::kImages,
      image_options(64, 3, 8, 64), make_network<ResidualBlock>);
  add("plain-mobile", "depthwise separable convolutions", Task::kImages,
      image_options(64, 3, 12, 128), make_network<SeparableBlock>);
  add("plain-text", "LSTM layers on tokens", Task::kSequences,
      text_options(4, 0), make_text);
  add("plain-encoder", "transformer encoder layers on tokens", Task::kSequences,
      text_options(8, 8), make_encoder);
  add("plain-autoencoder", "strided and transposed convolutions", Task::kImages,
      image_options(128, 3, 4, 32), make_autoencoder);
}

}  // namespace

REPRISE_PLUGIN(register_plain);
