#include "recompute/known_modules.h"

#include <torch/nn.h>

namespace reprise::detail {
namespace {

template <class... Types>
std::vector<ModuleType> types_of() {
  return {module_type<Types>()...};
}

}  // namespace

const std::vector<ModuleType>& libtorch_modules() {
  namespace nn = torch::nn;
  static const std::vector<ModuleType> types = types_of<
      // Layers with parameters
      nn::Linear, nn::Bilinear, nn::Embedding, nn::EmbeddingBag, nn::Conv1d,
      nn::Conv2d, nn::Conv3d, nn::ConvTranspose1d, nn::ConvTranspose2d,
      nn::ConvTranspose3d, nn::TransformerEncoder, nn::TransformerEncoderLayer,
      // Normalization
      nn::BatchNorm1d, nn::BatchNorm2d, nn::BatchNorm3d, nn::InstanceNorm1d,
      nn::InstanceNorm2d, nn::InstanceNorm3d, nn::LayerNorm, nn::GroupNorm,
      nn::LocalResponseNorm, nn::CrossMapLRN2d,
      // Dropout
      nn::Dropout, nn::Dropout2d, nn::Dropout3d, nn::AlphaDropout,
      nn::FeatureAlphaDropout,
      // Activations
      nn::ELU, nn::SELU, nn::CELU, nn::GELU, nn::GLU, nn::SiLU, nn::Mish,
      nn::ReLU, nn::ReLU6, nn::RReLU, nn::PReLU, nn::LeakyReLU, nn::Sigmoid,
      nn::LogSigmoid, nn::Tanh, nn::Tanhshrink, nn::Hardtanh, nn::Hardshrink,
      nn::Softmax, nn::Softmax2d, nn::LogSoftmax, nn::Softmin, nn::Softplus,
      nn::Softshrink, nn::Softsign, nn::Threshold,
      // Pooling
      nn::AvgPool1d, nn::AvgPool2d, nn::AvgPool3d, nn::MaxPool1d, nn::MaxPool2d,
      nn::MaxPool3d, nn::LPPool1d, nn::LPPool2d, nn::AdaptiveAvgPool1d,
      nn::AdaptiveAvgPool2d, nn::AdaptiveAvgPool3d, nn::AdaptiveMaxPool1d,
      nn::AdaptiveMaxPool2d, nn::AdaptiveMaxPool3d, nn::FractionalMaxPool2d,
      nn::FractionalMaxPool3d,
      // Shapes
      nn::Identity, nn::Flatten, nn::Unflatten, nn::Fold, nn::Unfold,
      nn::Upsample, nn::PixelShuffle, nn::PixelUnshuffle, nn::ReflectionPad1d,
      nn::ReflectionPad2d, nn::ReflectionPad3d, nn::ReplicationPad1d,
      nn::ReplicationPad2d, nn::ReplicationPad3d, nn::ZeroPad2d,
      nn::ConstantPad1d, nn::ConstantPad2d, nn::ConstantPad3d,
      // Losses of a prediction and its target
      nn::L1Loss, nn::MSELoss, nn::SmoothL1Loss, nn::HuberLoss, nn::BCELoss,
      nn::BCEWithLogitsLoss, nn::NLLLoss, nn::CrossEntropyLoss, nn::KLDivLoss,
      nn::PoissonNLLLoss, nn::SoftMarginLoss, nn::MultiMarginLoss,
      nn::MultiLabelMarginLoss, nn::MultiLabelSoftMarginLoss,
      nn::HingeEmbeddingLoss,
      // Containers with a forward
      nn::Sequential, nn::Functional>();
  return types;
}

}  // namespace reprise::detail
