#pragma once

#include <reprise/ops/shared_norm.h>

#include <ATen/Context.h>
#include <torch/nn/modules/batchnorm.h>

namespace reprise::detail {

/// torch::nn::BatchNorm2d, over several processes where a SharedNormScope is open.
/// (That class itself cannot be derived from: parts of it are not exported.)
class BatchNorm2dImpl
    : public torch::nn::NormImplBase<2, BatchNorm2dImpl,
                                     torch::nn::BatchNormOptions> {
 public:
  explicit BatchNorm2dImpl(const torch::nn::BatchNormOptions& options)
      : NormImplBase(options) {}

  torch::Tensor forward(const torch::Tensor& x) {
    _check_input_dim(x);
    const torch::Tensor y = shared_batch_norm(*this, x);
    if (y.defined()) return y;
    if (is_training()) {
      TORCH_CHECK(x.numel() > x.size(1),
                  "[BatchNorm2d] expected more than one value a channel in "
                  "training, got ",
                  x.sizes());
      num_batches_tracked.add_(1);
    }
    return torch::batch_norm(x, weight, bias, running_mean, running_var,
                             is_training(), *options.momentum(), options.eps(),
                             at::globalContext().userEnabledCuDNN());
  }

 private:
  void _check_input_dim(const torch::Tensor& x) override {
    TORCH_CHECK(x.dim() == 4, "[BatchNorm2d] expected (N, C, H, W), got ",
                x.sizes());
  }
};
TORCH_MODULE(BatchNorm2d);

}  // namespace reprise::detail
