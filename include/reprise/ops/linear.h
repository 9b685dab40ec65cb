#pragma once

#include <torch/types.h>

#include <vector>

namespace reprise::ops {

/// Layout of the weight of a linear layer.
enum class WeightLayout {
  kOutIn,  ///< (out, in), as in torch::nn::Linear
  kInOut,  ///< (in, out)
};

/// Linear layer: x (…, in) times the weight, plus `bias` (out) if it is defined. Equivalent
/// to torch::linear(), under autocast too.
///
/// If WeightCopies holds a copy of `weight` in the type that autocast selects, the layer
/// uses the copy, and the backward adds the gradient of the weight to `weight.grad()` in
/// one matrix product that accumulates in float32. The gradient then does not pass through
/// autograd: torch::autograd::grad() and hooks of the weight do not see it. The same holds
/// for a bias that has a copy. No second derivative in this case.
///
/// `residual` (…, out), for the end of a residual branch, is added to the result, which has
/// its type if that is the wider one. With a copy on CUDA, large matrix products add bias
/// and residual without a pass over memory and round once.
///
/// `output_needed`: false if nothing reads the values of the result, as in the last layer of a
/// stage while outputs_unused() is true. With a copy they are not computed then.
torch::Tensor linear(const torch::Tensor& x, const torch::Tensor& weight,
                     const torch::Tensor& bias = {},
                     WeightLayout layout = WeightLayout::kOutIn,
                     const torch::Tensor& residual = {},
                     bool output_needed = true);

/// Two or three linear layers of one input x (…, in), such as the projections to queries,
/// keys and values. Weights have layout kOutIn and may have different numbers of outputs.
/// `biases`: none, or one per weight. Returns the outputs (…, out), one per weight. Throws
/// c10::Error on other numbers of weights or biases.
///
/// Computes one matrix product if the weights are adjacent in memory (see
/// pack_contiguous()), the biases as well, and WeightCopies holds copies of all of them;
/// the outputs are then views of one tensor. Gradients are added as by linear(); new ones
/// are adjacent in memory too.
std::vector<torch::Tensor> packed_linear(
    const torch::Tensor& x, const std::vector<torch::Tensor>& weights,
    const std::vector<torch::Tensor>& biases = {});

/// packed_linear() with its outputs side by side in one tensor, (…, sum of all out), for
/// operators that read them from there. Undefined if packed_linear() does not compute one
/// matrix product: the caller then uses it instead.
torch::Tensor joined_linear(const torch::Tensor& x,
                            const std::vector<torch::Tensor>& weights,
                            const std::vector<torch::Tensor>& biases = {});

/// Moves matrices with equal numbers of columns, or vectors, to adjacent memory, so that
/// one matrix product can use them as one matrix. Values do not change.
void pack_contiguous(const std::vector<torch::Tensor>& parameters);

namespace fallback {

/// torch::linear(); with layout kInOut, torch::addmm() or torch::mm().
torch::Tensor linear(const torch::Tensor& x, const torch::Tensor& weight,
                     const torch::Tensor& bias = {},
                     WeightLayout layout = WeightLayout::kOutIn);

/// One call of ops::linear() per weight.
std::vector<torch::Tensor> packed_linear(
    const torch::Tensor& x, const std::vector<torch::Tensor>& weights,
    const std::vector<torch::Tensor>& biases = {});

}  // namespace fallback

/// Activation of a feed-forward layer.
enum class Activation {
  kGelu,      ///< torch::gelu(x)
  kGeluTanh,  ///< torch::gelu(x, "tanh")
  kRelu,
  kSilu,
};

/// Parameters of the feed-forward layer of a transformer block: a linear layer to the hidden
/// width, an activation, and a linear layer back. Biases may be undefined.
struct FeedForwardLayers {
  torch::Tensor weight1{}, bias1{};
  torch::Tensor weight2{}, bias2{};
  WeightLayout layout = WeightLayout::kOutIn;  ///< of both weights
};

/// Linear layer, activation, linear layer: x (…, in) to (…, out).
///
/// On CUDA in half precision, with kernels, a hidden width that is a multiple of 8, and
/// copies of all layers in WeightCopies, the activation is one pass in the forward. The
/// backward computes the gradient of the activation and that of `bias1` in one pass, and
/// adds the gradients of the layers as linear() does; no second derivative. In all other
/// cases this is the fallback. `recompute_activation`: save only the input of the
/// activation, which the backward applies again, with the same results. The fallback
/// ignores it; use checkpoint().
torch::Tensor feed_forward(const torch::Tensor& x,
                           const FeedForwardLayers& layers,
                           Activation activation,
                           bool recompute_activation = false);

/// The first linear layer of feed_forward(), for code that recomputes its input. Its result
/// must be passed to feed_forward_down() with the same layers, which adds the gradient of
/// `bias1` if has_fused_feed_forward() is true.
torch::Tensor feed_forward_up(const torch::Tensor& x,
                              const FeedForwardLayers& layers);

/// Activation and second linear layer of feed_forward(), for the result of
/// feed_forward_up() (…, hidden). `residual`, `output_needed`: as in linear().
torch::Tensor feed_forward_down(const torch::Tensor& up,
                                const FeedForwardLayers& layers,
                                Activation activation,
                                bool recompute_activation = false,
                                const torch::Tensor& residual = {},
                                bool output_needed = true);

/// Whether feed_forward() of x does not use the fallback. `x` may also be the result of
/// feed_forward_up(). False if a weight is undefined.
bool has_fused_feed_forward(const torch::Tensor& x,
                            const FeedForwardLayers& layers);

/// Applies `activation` with LibTorch's operator.
torch::Tensor activate(const torch::Tensor& x, Activation activation);

namespace fallback {

/// linear(), activate(), linear().
torch::Tensor feed_forward(const torch::Tensor& x,
                           const FeedForwardLayers& layers,
                           Activation activation);

}  // namespace fallback

/// torch::silu(gate) * up, the activation of a gated feed-forward layer. gate and up have
/// the same shape and type; they may be views of the result of one matrix product.
///
/// Saves gate and up; the backward recomputes silu(gate), which the fallback saves as well.
/// On CUDA in float32 or half precision, one pass forward and one backward, computed in
/// float32 and rounded once, if rows are aligned to 16 bytes. Values and gradients of all
/// others equal the fallback's bit for bit. No second derivative. Throws c10::Error if
/// shapes or types differ.
torch::Tensor swiglu(const torch::Tensor& gate, const torch::Tensor& up);

/// swiglu() of the first and the second half of the last dimension of x (…, 2 M), such as
/// the result of joined_linear(). Returns (…, M). With the kernel, the backward writes the
/// gradient of x in one pass; with swiglu(), autograd would copy both halves together.
torch::Tensor packed_swiglu(const torch::Tensor& x);

namespace fallback {

/// torch::silu(gate) * up. Saves gate, silu(gate) and up.
torch::Tensor swiglu(const torch::Tensor& gate, const torch::Tensor& up);

}  // namespace fallback

}  // namespace reprise::ops
