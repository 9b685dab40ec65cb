#include <reprise/data/dataset.h>

#include <c10/util/Exception.h>
#include <torch/nn/functional/upsampling.h>

namespace reprise {
namespace {

torch::Tensor resized(torch::Tensor images, int64_t side) {
  if (side == 0 || (images.size(2) == side && images.size(3) == side)) {
    return images;
  }
  namespace functional = torch::nn::functional;
  return functional::interpolate(images,
                                 functional::InterpolateFuncOptions()
                                     .size(std::vector<int64_t>{side, side})
                                     .mode(torch::kBilinear)
                                     .align_corners(false));
}

}  // namespace

void prepare(Batch& batch, const PrepareOptions& options) {
  const torch::NoGradGuard no_grad;
  torch::Tensor& inputs = batch.tensors.at(0);
  torch::Tensor& targets = batch.tensors.at(1);
  const auto type = inputs.scalar_type();
  if (type == torch::kLong) return;
  if (type != torch::kUInt8) {
    TORCH_CHECK(
        !options.pixel_targets || targets.dim() == 3,
        "[prepare] expected uint8 images, or float images with per-pixel "
        "targets; got float images with targets of ",
        targets.dim(), " dimensions");
    return;
  }
  TORCH_CHECK(
      inputs.dim() == 4 && options.image_size >= 0 && options.stddev > 0,
      "[prepare] expected images (N, C, H, W), a size of at least 0 and "
      "a stddev above 0, got ",
      inputs.sizes(), ", ", options.image_size, " and ", options.stddev);
  torch::Tensor images =
      resized(inputs.to(torch::kFloat).div_(255), options.image_size);
  if (options.pixel_targets) {
    // The channels of a grayscale image are equal.
    targets = images.select(1, 0)
                  .gt(0.5)
                  .to(torch::kLong)
                  .mul_((targets + 1).view({-1, 1, 1}));
  }
  inputs = images.sub_(options.mean).div_(options.stddev);
}

void move_to(Batch& batch, torch::Device device) {
  for (auto& tensor : batch.tensors) {
    if (tensor.defined()) tensor = tensor.to(device, /*non_blocking=*/true);
  }
}

}  // namespace reprise
