#include "compat/autocast.h"
#include "ops/cuda/image_conv.h"
#include "ops/function.h"
#include "ops/kernels.h"

#include <reprise/ops/conv.h>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <optional>

namespace reprise::ops {
namespace {

namespace kernels = reprise::detail::kernels;
using detail::float_data;
using kernels::ImageConvShape;
using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

ImageConvShape conv_shape(const Tensor& x, const Tensor& weight, int64_t stride,
                          int64_t padding) {
  ImageConvShape shape;
  shape.samples = x.size(0);
  shape.channels = x.size(1);
  shape.height = x.size(2);
  shape.width = x.size(3);
  shape.filters = weight.size(0);
  shape.kernel_size = weight.size(2);
  shape.stride = stride;
  shape.padding = padding;
  return shape;
}

class ImageConvOperator : public torch::autograd::Function<ImageConvOperator> {
 public:
  /// `bias`: empty if there is none.
  static Tensor forward(AutogradContext* context, const Tensor& x,
                        const Tensor& weight, const Tensor& bias,
                        int64_t stride, int64_t padding) {
    detail::save_before_output(*context, {x, weight});
    const ImageConvShape shape = conv_shape(x, weight, stride, padding);
    const Tensor y = torch::empty(
        {shape.samples, shape.filters, shape.out_height(), shape.out_width()},
        x.options());
    kernels::ImageConvForward launch;
    launch.shape = shape;
    launch.x = x.data_ptr<float>();
    launch.weight = weight.data_ptr<float>();
    launch.bias = float_data(bias);
    launch.y = y.data_ptr<float>();
    kernels::image_conv_forward(launch, detail::kernel_stream(x));
    context->saved_data["stride"] = stride;
    context->saved_data["padding"] = padding;
    context->saved_data["bias"] = bias.numel() > 0;
    return y;
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    detail::check_first_order("image_conv");
    const auto saved = context->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1];
    const ImageConvShape shape =
        conv_shape(x, weight, context->saved_data["stride"].toInt(),
                   context->saved_data["padding"].toInt());
    const Tensor dy = gradients[0].contiguous();
    const Tensor scratch = torch::empty({shape.scratch_size()}, x.options());
    const Tensor dweight = torch::empty_like(weight);
    const Tensor dbias = context->saved_data["bias"].toBool()
                             ? torch::empty({shape.filters}, x.options())
                             : Tensor();
    kernels::ImageConvBackward launch;
    launch.shape = shape;
    launch.x = x.data_ptr<float>();
    launch.dy = dy.data_ptr<float>();
    launch.scratch = scratch.data_ptr<float>();
    launch.dweight = dweight.data_ptr<float>();
    launch.dbias = float_data(dbias);
    kernels::image_conv_backward(launch, detail::kernel_stream(x));
    return {{}, dweight, dbias, {}, {}};
  }
};

/// Padding, if it is a number and the same on all sides.
std::optional<int64_t> uniform_padding(const torch::nn::Conv2dImpl& conv) {
  // c10::variant or std::variant, depending on the version; ADL finds get_if().
  const auto padding = conv.options.padding();
  const auto* sides = get_if<torch::ExpandingArray<2>>(&padding);
  if (sides == nullptr || (*sides)->at(0) != (*sides)->at(1)) return {};
  return (*sides)->at(0);
}

bool has_default_layout(const Tensor& tensor) {
  return tensor.is_contiguous() &&
         tensor.suggest_memory_format() == torch::MemoryFormat::Contiguous;
}

/// Whether the kernels support the layer, except for its sizes.
bool image_conv_eligible(const torch::nn::Conv2dImpl& conv, const Tensor& x) {
  detail::KernelOperand images;
  images.min_dim = images.max_dim = 4;
  images.ignores_autocast = true;
  if (!detail::kernel_eligible(x, images) || x.requires_grad() ||
      !has_default_layout(x) || !detail::is_float32(conv.weight) ||
      !has_default_layout(conv.weight)) {
    return false;
  }
  const auto& options = conv.options;
  return conv.weight.size(1) == x.size(1) && options.groups() == 1 &&
         options.dilation()->at(0) == 1 && options.dilation()->at(1) == 1 &&
         options.stride()->at(0) == options.stride()->at(1) &&
         conv.weight.size(2) == conv.weight.size(3) &&
         get_if<torch::enumtype::kZeros>(&options.padding_mode()) != nullptr;
}

}  // namespace

Tensor fallback::image_conv(torch::nn::Conv2d conv, const Tensor& x) {
  return conv->forward(x);
}

Tensor image_conv(torch::nn::Conv2d conv, const Tensor& x) {
  const auto padding = uniform_padding(*conv);
  const int64_t stride = conv->options.stride()->at(0);
  if (!padding || !image_conv_eligible(*conv, x) ||
      !conv_shape(x, conv->weight, stride, *padding).supported()) {
    return fallback::image_conv(conv, x);
  }
  return ImageConvOperator::apply(x, conv->weight,
                                  detail::defined_or_empty(conv->bias, x),
                                  stride, *padding);
}

}  // namespace reprise::ops
