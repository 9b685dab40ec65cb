#pragma once

#include <torch/nn/modules/conv.h>

namespace reprise {

/// conv(x) of images (N, C, H, W), where a network begins.
///
/// On CUDA, in single precision, with up to four channels, filters of 2 × 2 or 3 × 3 and
/// images that ask for no gradient, this is an operator of its own. cuDNN shares the
/// gradient of such filters out among few blocks, each of a sample: that of 16 filters
/// over four images of 3584² takes 900 ms on an H200, where reading all of it takes one.
/// Here as many blocks as the device has room for read it once, each sums its part, and
/// the parts are added in their order; the bias goes along both ways. Equal to LibTorch's
/// up to the order of additions, in single precision even where TF32 is allowed; the same
/// bits in every run. No second derivative.
///
/// Elsewhere it is conv->forward(x). Not for later layers: in a pass that keeps nothing
/// their inputs ask for no gradient either, and its recomputation would be another one's.
torch::Tensor lean_image_conv(torch::nn::Conv2d conv, const torch::Tensor& x);

}  // namespace reprise
