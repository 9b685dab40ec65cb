#include "ops/channels_last.h"
#include "ops/cuda/norm_act.h"
#include "ops/cuda/norm_act_pool.h"
#include "ops/cuda/norm_statistics.h"
#include "ops/function.h"
#include "ops/kernels.h"

#include <reprise/ops/conv.h>
#include <reprise/ops/pool.h>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <optional>
#include <vector>

namespace reprise::ops {
namespace {

namespace kernels = reprise::detail::kernels;
using kernels::PoolWindow;
using kernels::RowsShape;
using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

template <class Launch>
void describe_bias(Launch& launch, const RowsShape& shape, const Tensor& bias) {
  launch.shape = shape;
  launch.norm.bias = bias.data_ptr<float>();
}

Tensor merge_bias_gradient(const RowsShape& shape, const Tensor& scratch,
                           const Tensor& bias) {
  const Tensor dbias = torch::empty_like(bias);
  kernels::NormSums launch;
  launch.shape = shape;
  launch.scratch = scratch.data_ptr<float>();
  launch.dbias = dbias.data_ptr<float>();
  kernels::norm_sums(launch, detail::kernel_stream(bias));
  return dbias;
}

/// relu(x + bias), written over x.
class BiasReluOperator : public torch::autograd::Function<BiasReluOperator> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x,
                        const Tensor& bias) {
    kernels::NormActForward launch;
    describe_bias(launch, detail::rows_shape(x, 0, false), bias);
    launch.activation = kernels::Activation::kRelu;
    launch.norm.x = x.data_ptr();
    launch.y = x.data_ptr();
    kernels::norm_act_forward(launch, detail::kernel_stream(x));
    const Tensor y = x.variable_data();  // the same memory
    context->save_for_backward({y, bias});
    return y;
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    detail::check_first_order("conv_relu");
    const auto saved = context->get_saved_variables();
    const Tensor &y = saved[0], &bias = saved[1];
    const Tensor dy = detail::as_rows(gradients[0], y.scalar_type());
    const Tensor dx = torch::empty_like(y);
    const RowsShape shape = detail::rows_shape(y, 0, false);
    const Tensor scratch = torch::empty({shape.scratch_size()}, bias.options());
    kernels::NormActSums launch;
    describe_bias(launch, shape, bias);
    launch.dy = dy.data_ptr();
    launch.activation = kernels::Activation::kRelu;
    launch.y = y.data_ptr();
    launch.g = dx.data_ptr();
    launch.scratch = scratch.data_ptr<float>();
    kernels::norm_act_sums(launch, detail::kernel_stream(y));
    return {dx, merge_bias_gradient(shape, scratch, bias)};
  }
};

/// max_pool(relu(x + bias)).
class BiasReluPoolOperator
    : public torch::autograd::Function<BiasReluPoolOperator> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x,
                        const Tensor& bias, const MaxPoolOptions& pool) {
    const PoolWindow window = detail::pool_window(pool);
    const auto pooled =
        detail::pool_rows(x, bias, kernels::Activation::kRelu, window);
    context->save_for_backward({pooled.positions, bias});
    auto& data = context->saved_data;
    data["sizes"] = x.sizes().vec();
    data["window"] = std::vector<int64_t>{window.kernel, window.padding};
    return pooled.y;
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    detail::check_first_order("conv_relu");
    const auto saved = context->get_saved_variables();
    auto& data = context->saved_data;
    const auto window = data["window"].toIntVector();
    const auto unpooled =
        detail::unpool_rows(gradients[0], saved[0], data["sizes"].toIntVector(),
                            {window[0], window[1]});
    const RowsShape shape = detail::rows_shape(unpooled.dx, 0, true);
    return {unpooled.dx,
            merge_bias_gradient(shape, unpooled.scratch, saved[1]),
            {}};
  }
};

/// Whether to run the convolution without its bias.
bool conv_relu_eligible(const torch::nn::Conv2dImpl& conv, const Tensor& x) {
  const auto padding = conv.options.padding();
  return detail::kernels_available(x.device()) && x.dim() == 4 &&
         x.numel() > 0 && x.is_contiguous(at::MemoryFormat::ChannelsLast) &&
         detail::is_float32(conv.bias) && conv.bias.numel() % 8 == 0 &&
         get_if<torch::ExpandingArray<2>>(&padding) != nullptr &&
         get_if<torch::enumtype::kZeros>(&conv.options.padding_mode()) !=
             nullptr;
}

Tensor relu_and_pool(Tensor x, const ConvReluOptions& options) {
  if (!options.pool) return x.relu_();
  if (options.compact_pool) return relu_max_pool2d(x, *options.pool);
  // The ReLU commutes with the maximum, and after the pool it has fewer values.
  return fallback::max_pool2d(x, *options.pool).relu_();
}

}  // namespace

Tensor fallback::conv_relu(torch::nn::Conv2d conv, const Tensor& x,
                           const ConvReluOptions& options) {
  return relu_and_pool(conv->forward(x), options);
}

Tensor conv_relu(torch::nn::Conv2d conv, const Tensor& x,
                 const ConvReluOptions& options) {
  if (!conv_relu_eligible(*conv, x)) {
    return fallback::conv_relu(conv, x, options);
  }
  const auto& layer = conv->options;
  const auto padding = layer.padding();
  const Tensor y = torch::conv2d(x, conv->weight, {}, layer.stride(),
                                 *get_if<torch::ExpandingArray<2>>(&padding),
                                 layer.dilation(), layer.groups());
  if (!detail::rows_eligible(y) ||
      (options.pool && !detail::pool_of_rows_eligible(y, *options.pool))) {
    const Tensor bias = conv->bias.to(y.scalar_type()).view({1, -1, 1, 1});
    return relu_and_pool(y + bias, options);
  }
  const Tensor rows = detail::as_rows(y, y.scalar_type());
  return options.pool
             ? BiasReluPoolOperator::apply(rows, conv->bias, *options.pool)
             : BiasReluOperator::apply(rows, conv->bias);
}

}  // namespace reprise::ops
