// Norms in convolutional networks in channels-last: ops::norm_act() compared with the
// library's sequence of operators. The time of the forward and of the backward, and of as
// many copies of x as give the traffic of the kernels, a lower bound. On other devices than
// CUDA both are the library's.
#include "options.h"
#include "repeated.h"
#include "side_by_side.h"

#include <reprise/ops/norm.h>
#include <reprise/version.h>

#include <fmt/format.h>
#include <torch/types.h>

#include <string>

namespace {

using reprise::ops::NormActOptions;
using torch::Tensor;

enum class Follows { kRelu, kResidual, kPool };

struct Layer {
  std::string name;
  int64_t channels, side;
  Follows follows;
};

// Norms of ResNet-50 at 224².
const Layer kLayers[] = {
    {"stem, pool", 64, 112, Follows::kPool},
    {"layer1", 64, 56, Follows::kRelu},
    {"layer1, residual", 256, 56, Follows::kResidual},
    {"layer2", 128, 28, Follows::kRelu},
    {"layer2, residual", 512, 28, Follows::kResidual},
    {"layer3", 256, 14, Follows::kRelu},
    {"layer3, residual", 1024, 14, Follows::kResidual},
    {"layer4", 512, 7, Follows::kRelu},
    {"layer4, residual", 2048, 7, Follows::kResidual},
};

class Case {
 public:
  Case(const Layer& layer, int64_t samples, torch::ScalarType type,
       torch::Device device)
      : norm_(layer.channels) {
    norm_->to(device);
    const auto draw = [&] {
      return torch::randn({samples, layer.channels, layer.side, layer.side},
                          torch::device(device))
          .to(type)
          .contiguous(at::MemoryFormat::ChannelsLast);
    };
    x_ = draw().requires_grad_();
    if (layer.follows == Follows::kResidual) {
      options_.residual = draw().requires_grad_();
    }
    if (layer.follows == Follows::kPool) {
      options_.pool = reprise::ops::MaxPoolOptions{3, 2, 1};
    }
    const torch::NoGradGuard no_grad;
    slope_ = torch::randn_like(
        reprise::ops::fallback::norm_act(norm_, x_, options_));
    copies_ = layer.follows == Follows::kResidual ? 5.5
              : layer.follows == Follows::kPool   ? 3
                                                  : 4;
  }

  void ours() {
    reprise::ops::norm_act(norm_, x_, options_).backward(slope_);
    clear();
  }
  void library() {
    reprise::ops::fallback::norm_act(norm_, x_, options_).backward(slope_);
    clear();
  }
  void copy() {
    const torch::NoGradGuard no_grad;
    (void)x_.clone();
  }
  /// Copies of x that read and write as much as the kernels, forward and backward.
  double copies() const { return copies_; }

 private:
  void clear() {
    x_.mutable_grad() = Tensor();
    if (options_.residual.defined())
      options_.residual.mutable_grad() = Tensor();
  }

  torch::nn::BatchNorm2d norm_;
  Tensor x_, slope_;
  NormActOptions options_;
  double copies_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  std::string place = "cpu";
  int64_t samples = 256;
  int repeats = 7;
  reprise::bench::Options(
      "Norms of ResNet-50 in channels-last, by our kernels and by the library")
      .add_device(&place)
      .add("--samples", &samples, "Number of images")
      .add_positive("--repeats", &repeats, "Timed runs of each, alternating")
      .parse(argc, argv);
  const torch::Device device = reprise::bench::device_named(place);
  const auto type = device.is_cuda() ? torch::kBFloat16 : torch::kFloat;

  fmt::print("LibTorch {}, {}, {} images, forward and backward\n\n",
             reprise::libtorch_version(), place, samples);
  fmt::print("{:<20}{:>14}{:>14}{:>12}{:>10}{:>14}\n", "norm", "image",
             "library, ms", "ours, ms", "ratio", "copies, ms");
  for (const Layer& layer : kLayers) {
    Case one(layer, samples, type, device);
    reprise::bench::Repeated ours(device, 1, [&] { one.ours(); });
    reprise::bench::Repeated library(device, 1, [&] { one.library(); });
    reprise::bench::Repeated copy(device, 1, [&] { one.copy(); });
    const auto took = reprise::bench::side_by_side([&] { ours(); },
                                                   [&] { library(); }, repeats);
    const auto least =
        reprise::bench::side_by_side([&] { copy(); }, [&] { copy(); }, repeats);
    fmt::print("{:<20}{:>14}{:>14.3f}{:>12.3f}{:>10.2f}{:>14.3f}\n", layer.name,
               fmt::format("{} x {}²", layer.channels, layer.side),
               took.second_ms.median, took.first_ms.median, took.ratio.median,
               one.copies() * least.first_ms.median);
  }
  return 0;
}
