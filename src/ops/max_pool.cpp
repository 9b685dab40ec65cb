#include <reprise/ops/max_pool.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace reprise {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Indices of 8 bytes that exist at one moment, unless one sample has more: few
// enough for a CPU's cache, enough to keep a GPU busy.
constexpr int64_t kMostIndicesOnCpu = int64_t{1} << 16;
constexpr int64_t kMostIndices = int64_t{1} << 22;

/// One pooling: its window, and how places within it are written as a byte.
///
/// LibTorch's index of a maximum is h·W + w in its plane. Less the index of the
/// window's first place (which may lie in the padding) that is kh·W + kw, and in
/// a byte kh·kernel + kw. The row kh is found by comparing, which is faster than
/// a division.
class PlacePool {
 public:
  PlacePool(const MaxPoolOptions& options, std::vector<int64_t> sizes)
      : kernel_(options.kernel),
        stride_(options.stride == 0 ? options.kernel : options.stride),
        padding_(options.padding),
        sizes_(std::move(sizes)),
        width_(sizes_[3]) {}

  std::vector<int64_t> output_sizes() const {
    const auto windows = [&](int64_t side) {
      return (side + 2 * padding_ - kernel_) / stride_ + 1;
    };
    return {sizes_[0], sizes_[1], windows(sizes_[2]), windows(width_)};
  }

  /// Fills `output` and `places`.
  void forward(const Tensor& x, Tensor& output, Tensor& places) const {
    const Tensor first_index = make_first_index(x.device());
    Tensor indices = torch::empty({0}, places.options().dtype(torch::kLong));
    for_samples(x.device(), [&](int64_t first, int64_t count) {
      Tensor values = output.narrow(0, first, count);
      indices.resize_({0});  // of another size: LibTorch wants to be told
      torch::max_pool2d_with_indices_out(values, indices,
                                         x.narrow(0, first, count), kernel_,
                                         stride_, padding_);
      places.narrow(0, first, count)
          .copy_(to_places(indices.sub_(first_index)));
    });
  }

  /// Fills `result`, the gradient of the input.
  void backward(const Tensor& gradient, const Tensor& places,
                Tensor& result) const {
    const Tensor first_index = make_first_index(gradient.device());
    for_samples(gradient.device(), [&](int64_t first, int64_t count) {
      Tensor values = result.narrow(0, first, count);
      // Of the input the shape is asked for, never the values.
      torch::max_pool2d_with_indices_backward_out(
          values, gradient.narrow(0, first, count), values, kernel_, stride_,
          padding_, /*dilation=*/1, /*ceil_mode=*/false,
          to_offsets(places.narrow(0, first, count)).add_(first_index));
    });
  }

 private:
  template <class F>
  void for_samples(torch::Device device, F&& body) const {
    const auto out = output_sizes();
    const int64_t most = device.is_cpu() ? kMostIndicesOnCpu : kMostIndices;
    const int64_t each = std::max<int64_t>(out[1] * out[2] * out[3], 1);
    const int64_t part = std::max<int64_t>(most / each, 1);
    for (int64_t first = 0; first < out[0]; first += part) {
      body(first, std::min(part, out[0] - first));
    }
  }

  /// Of each window's first place: (rows, columns) of windows.
  Tensor make_first_index(torch::Device device) const {
    const auto out = output_sizes();
    const auto options = torch::dtype(torch::kLong).device(device);
    const Tensor rows = torch::arange(out[2], options);
    const Tensor columns = torch::arange(out[3], options);
    return ((rows * stride_ - padding_) * width_).unsqueeze(1) +
           (columns * stride_ - padding_);
  }

  Tensor to_places(const Tensor& offsets) const {
    Tensor places = offsets.clone();
    for (int64_t row = 1; row < kernel_; ++row) {
      places.add_(offsets.ge(row * width_), kernel_ - width_);
    }
    return places;
  }

  Tensor to_offsets(const Tensor& places) const {
    Tensor offsets = places.to(torch::kLong);
    for (int64_t row = 1; row < kernel_; ++row) {
      offsets.add_(places.ge(row * kernel_), width_ - kernel_);
    }
    return offsets;
  }

  int64_t kernel_, stride_, padding_;
  std::vector<int64_t> sizes_;  // of the input
  int64_t width_;
};

class PoolOperator : public torch::autograd::Function<PoolOperator> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x,
                        const MaxPoolOptions& options, bool relu) {
    const PlacePool pool(options, x.sizes().vec());
    const auto sizes = pool.output_sizes();
    const auto format = x.suggest_memory_format();
    Tensor output = torch::empty(sizes, x.options(), format);
    Tensor places =
        torch::empty(sizes, x.options().dtype(torch::kByte), format);
    pool.forward(x, output, places);
    // After the pool: a monotone function of fewer values.
    if (relu) output.relu_();
    context->save_for_backward(relu ? variable_list{places, output}
                                    : variable_list{places});
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
    TORCH_CHECK(!torch::GradMode::is_enabled(),
                "[lean_max_pool2d] has no second derivative; use "
                "torch::max_pool2d");
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
    PlacePool(options, sizes).backward(gradient, saved[0], result);
    return {result, {}, {}};
  }
};

Tensor pool_lean(const Tensor& x, const MaxPoolOptions& options, bool relu) {
  TORCH_CHECK(x.dim() == 4, "[lean_max_pool2d] expected (N, C, H, W), got ",
              x.sizes());
  const int64_t stride = options.stride == 0 ? options.kernel : options.stride;
  TORCH_CHECK(options.kernel >= 1 && stride >= 1,
              "[lean_max_pool2d] expected a kernel and a stride of at least 1, "
              "got ",
              options.kernel, " and ", stride);
  if (options.kernel > 16 || options.kernel > x.size(3) || x.numel() == 0) {
    return torch::max_pool2d(relu ? torch::relu(x) : x, options.kernel, stride,
                             options.padding);
  }
  return PoolOperator::apply(x, options, relu);
}

}  // namespace

Tensor lean_max_pool2d(const Tensor& x, const MaxPoolOptions& options) {
  return pool_lean(x, options, /*relu=*/false);
}

Tensor lean_relu_max_pool2d(const Tensor& x, const MaxPoolOptions& options) {
  return pool_lean(x, options, /*relu=*/true);
}

}  // namespace reprise
