#include "ops/channels_last.h"
#include "ops/cuda/norm_act_pool.h"
#include "ops/function.h"

#include <reprise/ops/pool.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace reprise::ops {
namespace {

namespace kernels = reprise::detail::kernels;
using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Number of 8-byte indices that exist at a time, unless one sample has more: few enough for
// the cache of a CPU, enough to keep a GPU busy.
constexpr int64_t kMaxIndicesCpu = int64_t{1} << 16;
constexpr int64_t kMaxIndicesCuda = int64_t{1} << 22;

// Positions within a window are stored as one byte.
constexpr int64_t kMaxKernel = 16;

/// A max pool that stores the position of each maximum within its window as a byte.
///
/// LibTorch's index of a maximum is h·W + w in its plane. Its offset from the first element
/// of the window, which may lie in the padding, is kh·W + kw; the byte is kh·kernel + kw.
/// The row kh is found by comparisons, which are faster than a division.
class BytePositionPool {
 public:
  BytePositionPool(const MaxPoolOptions& options, std::vector<int64_t> sizes)
      : kernel_(options.kernel),
        stride_(options.step()),
        padding_(options.padding),
        sizes_(std::move(sizes)),
        width_(sizes_[3]) {}

  std::vector<int64_t> output_sizes() const {
    const auto windows = [&](int64_t side) {
      return (side + 2 * padding_ - kernel_) / stride_ + 1;
    };
    return {sizes_[0], sizes_[1], windows(sizes_[2]), windows(width_)};
  }

  /// Writes `output` and `positions`.
  void forward(const Tensor& x, Tensor& output, Tensor& positions) const {
    const Tensor first_index = make_first_index(x.device());
    Tensor indices = torch::empty({0}, positions.options().dtype(torch::kLong));
    for_samples(x.device(), [&](int64_t first, int64_t count) {
      Tensor values = output.narrow(0, first, count);
      indices.resize_(
          {0});  // LibTorch warns if it resizes a tensor that is not empty
      torch::max_pool2d_with_indices_out(values, indices,
                                         x.narrow(0, first, count), kernel_,
                                         stride_, padding_);
      positions.narrow(0, first, count)
          .copy_(to_positions(indices.sub_(first_index)));
    });
  }

  /// Writes `result`, the gradient of the input.
  void backward(const Tensor& gradient, const Tensor& positions,
                Tensor& result) const {
    const Tensor first_index = make_first_index(gradient.device());
    for_samples(gradient.device(), [&](int64_t first, int64_t count) {
      Tensor values = result.narrow(0, first, count);
      // Only the shape of the input is used, not its values.
      torch::max_pool2d_with_indices_backward_out(
          values, gradient.narrow(0, first, count), values, kernel_, stride_,
          padding_, /*dilation=*/1, /*ceil_mode=*/false,
          to_offsets(positions.narrow(0, first, count)).add_(first_index));
    });
  }

 private:
  template <class F>
  void for_samples(torch::Device device, F&& body) const {
    const auto out = output_sizes();
    const int64_t most = device.is_cpu() ? kMaxIndicesCpu : kMaxIndicesCuda;
    const int64_t each = std::max<int64_t>(out[1] * out[2] * out[3], 1);
    const int64_t part = std::max<int64_t>(most / each, 1);
    for (int64_t first = 0; first < out[0]; first += part) {
      body(first, std::min(part, out[0] - first));
    }
  }

  /// Index of the first element of each window: (rows, columns) of windows.
  Tensor make_first_index(torch::Device device) const {
    const auto out = output_sizes();
    const auto options = torch::dtype(torch::kLong).device(device);
    const Tensor rows = torch::arange(out[2], options);
    const Tensor columns = torch::arange(out[3], options);
    return ((rows * stride_ - padding_) * width_).unsqueeze(1) +
           (columns * stride_ - padding_);
  }

  Tensor to_positions(const Tensor& offsets) const {
    Tensor positions = offsets.clone();
    for (int64_t row = 1; row < kernel_; ++row) {
      positions.add_(offsets.ge(row * width_), kernel_ - width_);
    }
    return positions;
  }

  Tensor to_offsets(const Tensor& positions) const {
    Tensor offsets = positions.to(torch::kLong);
    for (int64_t row = 1; row < kernel_; ++row) {
      offsets.add_(positions.ge(row * kernel_), width_ - kernel_);
    }
    return offsets;
  }

  int64_t kernel_, stride_, padding_;
  std::vector<int64_t> sizes_;  // of the input
  int64_t width_;
};

class MaxPoolOperator : public torch::autograd::Function<MaxPoolOperator> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x,
                        const MaxPoolOptions& options, bool relu) {
    const BytePositionPool pool(options, x.sizes().vec());
    const auto sizes = pool.output_sizes();
    const auto format = x.suggest_memory_format();
    Tensor output = torch::empty(sizes, x.options(), format);
    Tensor positions =
        torch::empty(sizes, x.options().dtype(torch::kByte), format);
    pool.forward(x, output, positions);
    // After the pool, where there are fewer values; the ReLU commutes with the maximum.
    if (relu) output.relu_();
    context->save_for_backward(relu ? variable_list{positions, output}
                                    : variable_list{positions});
    auto& data = context->saved_data;
    data["kernel"] = options.kernel;
    data["stride"] = options.stride;
    data["padding"] = options.padding;
    data["sizes"] = x.sizes().vec();
    data["format"] = static_cast<int64_t>(format);
    return output;
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    detail::check_first_order("max_pool2d", "torch::max_pool2d");
    auto& data = context->saved_data;
    const auto saved = context->get_saved_variables();
    MaxPoolOptions options;
    options.kernel = data["kernel"].toInt();
    options.stride = data["stride"].toInt();
    options.padding = data["padding"].toInt();
    Tensor gradient = gradients[0];
    if (saved.size() > 1) {
      gradient = torch::threshold_backward(gradient, saved[1], 0);
    }
    const auto sizes = data["sizes"].toIntVector();
    const auto format = static_cast<at::MemoryFormat>(data["format"].toInt());
    Tensor result = torch::empty(sizes, gradient.options(), format);
    BytePositionPool(options, sizes).backward(gradient, saved[0], result);
    return {result, {}, {}};
  }
};

/// Of channels-last images, with the kernels of norms that are followed by a pool.
class RowsPoolOperator : public torch::autograd::Function<RowsPoolOperator> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& given,
                        const MaxPoolOptions& options, bool relu) {
    const Tensor x = detail::as_rows(given, given.scalar_type());
    const kernels::PoolWindow window = detail::pool_window(options);
    const auto pooled = detail::pool_rows(
        x, {}, relu ? kernels::Activation::kRelu : kernels::Activation::kNone,
        window);
    context->save_for_backward({pooled.positions});
    auto& data = context->saved_data;
    data["sizes"] = x.sizes().vec();
    data["window"] = std::vector<int64_t>{window.kernel, window.padding};
    return pooled.y;
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    detail::check_first_order("max_pool2d", "torch::max_pool2d");
    auto& data = context->saved_data;
    const auto window = data["window"].toIntVector();
    const auto unpooled = detail::unpool_rows(
        gradients[0], context->get_saved_variables()[0],
        data["sizes"].toIntVector(), {window[0], window[1]});
    return {unpooled.dx, {}, {}};
  }
};

bool rows_pool_eligible(const Tensor& x, const MaxPoolOptions& options) {
  return detail::rows_eligible(x) && detail::pool_of_rows_eligible(x, options);
}

void check_pool(const Tensor& x, const MaxPoolOptions& options) {
  TORCH_CHECK(x.dim() == 4, "[max_pool2d] expected (N, C, H, W), got ",
              x.sizes());
  TORCH_CHECK(options.kernel >= 1 && options.step() >= 1,
              "[max_pool2d] expected a kernel and a stride of at least 1, got ",
              options.kernel, " and ", options.step());
}

bool pool_eligible(const Tensor& x, const MaxPoolOptions& options) {
  return options.kernel <= kMaxKernel && options.kernel <= x.size(3) &&
         x.numel() > 0;
}

}  // namespace

Tensor fallback::max_pool2d(const Tensor& x, const MaxPoolOptions& options) {
  return torch::max_pool2d(x, options.kernel, options.step(), options.padding);
}

Tensor fallback::relu_max_pool2d(const Tensor& x,
                                 const MaxPoolOptions& options) {
  return fallback::max_pool2d(torch::relu(x), options);
}

Tensor max_pool2d(const Tensor& x, const MaxPoolOptions& options) {
  check_pool(x, options);
  if (rows_pool_eligible(x, options)) {
    return RowsPoolOperator::apply(x, options, /*relu=*/false);
  }
  if (!options.compact || !pool_eligible(x, options)) {
    return fallback::max_pool2d(x, options);
  }
  return MaxPoolOperator::apply(x, options, /*relu=*/false);
}

Tensor relu_max_pool2d(const Tensor& x, const MaxPoolOptions& options) {
  check_pool(x, options);
  if (rows_pool_eligible(x, options)) {
    return RowsPoolOperator::apply(x, options, /*relu=*/true);
  }
  if (!options.compact || !pool_eligible(x, options)) {
    return fallback::relu_max_pool2d(x, options);
  }
  return MaxPoolOperator::apply(x, options, /*relu=*/true);
}

}  // namespace reprise::ops
