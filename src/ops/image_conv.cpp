#include "ops/cuda/image_conv.h"

#include "compat/autocast.h"
#include "compat/cuda.h"

#include <reprise/ops/image_conv.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <optional>

namespace reprise {
namespace {

using kernels::ImageConv;
using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void* conv_stream(const Tensor& x) {
  return compat::current_cuda_stream(x.device().index());
}

float* values_or_null(const Tensor& tensor) {
  return tensor.defined() && tensor.numel() > 0 ? tensor.data_ptr<float>()
                                                : nullptr;
}

ImageConv conv_of(const Tensor& x, const Tensor& weight, int64_t stride,
                  int64_t padding) {
  ImageConv shape;
  shape.samples = x.size(0);
  shape.channels = x.size(1);
  shape.height = x.size(2);
  shape.width = x.size(3);
  shape.filters = weight.size(0);
  shape.side = weight.size(2);
  shape.stride = stride;
  shape.padding = padding;
  return shape;
}

class ImageConvOperator : public torch::autograd::Function<ImageConvOperator> {
 public:
  /// `bias`: of no values where there is none.
  static Tensor forward(AutogradContext* context, const Tensor& x,
                        const Tensor& weight, const Tensor& bias,
                        int64_t stride, int64_t padding) {
    const ImageConv shape = conv_of(x, weight, stride, padding);
    const Tensor y = torch::empty(
        {shape.samples, shape.filters, shape.out_height(), shape.out_width()},
        x.options());
    kernels::image_conv_forward(shape, x.data_ptr<float>(),
                                weight.data_ptr<float>(), values_or_null(bias),
                                y.data_ptr<float>(), conv_stream(x));
    context->save_for_backward({x, weight});
    context->saved_data["stride"] = stride;
    context->saved_data["padding"] = padding;
    context->saved_data["bias"] = bias.numel() > 0;
    return y;
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    TORCH_CHECK(!torch::GradMode::is_enabled(),
                "[lean_image_conv] has no second derivative");
    const auto saved = context->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1];
    const ImageConv shape =
        conv_of(x, weight, context->saved_data["stride"].toInt(),
                context->saved_data["padding"].toInt());
    const Tensor dy = gradients[0].contiguous();
    const Tensor scratch = torch::empty({shape.scratch()}, x.options());
    const Tensor dweight = torch::empty_like(weight);
    const Tensor dbias = context->saved_data["bias"].toBool()
                             ? torch::empty({shape.filters}, x.options())
                             : Tensor();
    kernels::image_conv_backward(
        shape, x.data_ptr<float>(), dy.data_ptr<float>(),
        scratch.data_ptr<float>(), dweight.data_ptr<float>(),
        values_or_null(dbias), conv_stream(x));
    return {{}, dweight, dbias, {}, {}};
  }
};

/// Its zeros on each side, where they are the same number on all.
std::optional<int64_t> padding_of(const torch::nn::Conv2dImpl& conv) {
  // LibTorch's variant became the standard's; either's namespace has it.
  const auto padding = conv.options.padding();
  const auto* sides = get_if<torch::ExpandingArray<2>>(&padding);
  if (sides == nullptr || (*sides)->at(0) != (*sides)->at(1)) return {};
  return (*sides)->at(0);
}

bool is_single_contiguous(const Tensor& tensor) {
  return tensor.scalar_type() == torch::kFloat && tensor.is_contiguous() &&
         tensor.suggest_memory_format() == torch::MemoryFormat::Contiguous;
}

/// Whether the kernels are for this, but for its sizes.
bool is_for_kernels(const torch::nn::Conv2dImpl& conv, const Tensor& x) {
  if (!kernels::image_conv_kernels_built() || !x.is_cuda() || x.dim() != 4 ||
      x.requires_grad() || !is_single_contiguous(x) ||
      !is_single_contiguous(conv.weight) ||
      compat::autocast_type(x) != torch::kFloat) {
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

Tensor lean_image_conv(torch::nn::Conv2d conv, const Tensor& x) {
  const auto padding = padding_of(*conv);
  if (!padding || !is_for_kernels(*conv, x)) return conv->forward(x);
  const int64_t stride = conv->options.stride()->at(0);
  if (!conv_of(x, conv->weight, stride, *padding).fits()) {
    return conv->forward(x);
  }
  const Tensor bias =
      conv->bias.defined() ? conv->bias : torch::empty({0}, x.options());
  return ImageConvOperator::apply(x, conv->weight, bias, stride, *padding);
}

}  // namespace reprise
