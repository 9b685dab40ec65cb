// First convolutions of networks: ops::image_conv() compared with the library. The time of
// the forward and of the gradients of weight and bias, and the error of the weight gradient
// relative to float64. A copy of the outputs is a lower bound: outputs are written once and
// their gradient is read once. On other devices than CUDA both are the library's.
#include "options.h"
#include "repeated.h"
#include "side_by_side.h"

#include <reprise/ops/conv.h>
#include <reprise/version.h>

#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>
#include <string>
#include <vector>

namespace {

using torch::Tensor;

struct First {
  std::string network;
  int64_t channels, filters, side, stride, padding;
  int64_t samples, size;
};

// First layers of the models, with the batches of bench/gpu.py.
const First kFirst[] = {
    {"cnn-basic", 1, 48, 2, 2, 0, 1, 112},
    {"cnn-blocks", 1, 16, 3, 1, 1, 1, 112},
    {"unet", 1, 64, 3, 1, 1, 4, 256},
    {"vgg16", 3, 64, 3, 1, 1, 32, 224},
    {"cnn-basic", 1, 16, 2, 2, 0, 16, 1792},
    {"cnn-basic", 1, 8, 2, 2, 0, 4, 3584},
    {"cnn-blocks", 1, 16, 3, 1, 1, 16, 1792},
    {"cnn-blocks", 1, 16, 3, 1, 1, 4, 3584},
};

class Conv {
 public:
  Conv(const First& first, torch::Device device)
      : first_(first),
        conv_(
            torch::nn::Conv2dOptions(first.channels, first.filters, first.side)
                .stride(first.stride)
                .padding(first.padding)) {
    conv_->to(device);
    x_ = torch::randn({first.samples, first.channels, first.size, first.size},
                      torch::device(device));
    const torch::NoGradGuard no_grad;
    slope_ = torch::randn_like(conv_->forward(x_));
  }

  void ours() { reprise::ops::image_conv(conv_, x_).backward(slope_); }
  void library() { conv_->forward(x_).backward(slope_); }
  void copy() {
    const torch::NoGradGuard no_grad;
    (void)slope_.clone();
  }
  /// Gradient of the weight in float64, one element of the filters at a time.
  Tensor exact_gradient() const {
    const int64_t side = first_.side, stride = first_.stride;
    const std::vector<int64_t> around(4, first_.padding);
    Tensor sum = torch::zeros(conv_->weight.sizes(),
                              conv_->weight.options().dtype(torch::kDouble));
    for (int64_t n = 0; n < x_.size(0); ++n) {
      const Tensor image =
          torch::constant_pad_nd(x_[n].to(torch::kDouble), around);
      const Tensor dy = slope_[n].to(torch::kDouble);
      for (int64_t i = 0; i < side; ++i) {
        for (int64_t j = 0; j < side; ++j) {
          const Tensor rows =
              image.slice(1, i, i + (dy.size(1) - 1) * stride + 1, stride);
          const Tensor seen =
              rows.slice(2, j, j + (dy.size(2) - 1) * stride + 1, stride);
          sum.select(2, i).select(2, j) +=
              torch::mm(dy.flatten(1), seen.flatten(1).t());
        }
      }
    }
    return sum;
  }
  template <class F>
  double error(const Tensor& exact, const F& step) {
    conv_->zero_grad();
    step();
    const Tensor got = conv_->weight.grad().to(torch::kDouble);
    return ((got - exact).norm() / exact.norm()).item<double>();
  }

 private:
  First first_;
  torch::nn::Conv2d conv_;
  Tensor x_, slope_;
};

}  // namespace

int main(int argc, char** argv) {
  std::string place = "cpu";
  int64_t most = int64_t{1} << 40;
  int repeats = 7;
  reprise::bench::Options(
      "First convolutions of networks, by our kernel and by the library")
      .add_device(&place)
      .add("--most-pixels", &most, "Skip cases with more pixels per batch")
      .add_positive("--repeats", &repeats, "Timed runs of each, alternating")
      .parse(argc, argv);
  const torch::Device device = reprise::bench::device_named(place);

  fmt::print("LibTorch {}, {}, forward and backward\n\n",
             reprise::libtorch_version(), place);
  fmt::print("{:<12}{:>14}{:>14}{:>12}{:>10}{:>12}{:>12}{:>12}\n", "network",
             "images", "library, ms", "ours, ms", "ratio", "a copy, ms",
             "error", "ours");
  for (const First& first : kFirst) {
    const int64_t pixels = first.samples * first.size * first.size;
    if (pixels > most) continue;
    Conv conv(first, device);
    // Repeat small cases, which are too short to time.
    const int times = pixels < 1000000 ? 20 : 1;
    const Tensor exact = conv.exact_gradient();
    const double library_error = conv.error(exact, [&] { conv.library(); });
    const double our_error = conv.error(exact, [&] { conv.ours(); });
    reprise::bench::Repeated ours(device, times, [&] { conv.ours(); });
    reprise::bench::Repeated library(device, times, [&] { conv.library(); });
    reprise::bench::Repeated copy(device, times, [&] { conv.copy(); });
    const auto took = reprise::bench::side_by_side([&] { ours(); },
                                                   [&] { library(); }, repeats);
    const auto least =
        reprise::bench::side_by_side([&] { copy(); }, [&] { copy(); }, repeats);
    fmt::print(
        "{:<12}{:>14}{:>14.3f}{:>12.3f}{:>10.2f}{:>12.3f}{:>12.1e}{:>12.1e}\n",
        first.network, fmt::format("{} x {}²", first.samples, first.size),
        took.second_ms.median / times, took.first_ms.median / times,
        took.ratio.median, least.first_ms.median / times, library_error,
        our_error);
    if (our_error > std::max(1e-5, 2 * library_error)) {
      fmt::print(stderr, "error: the error of our kernel is too large\n");
      return 1;
    }
  }
  return 0;
}
