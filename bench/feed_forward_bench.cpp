// The feed-forward layer of a transformer block (ops::feed_forward) compared with LibTorch's
// sequence of linear layer, activation and linear layer under autocast to bfloat16, both
// with gradients that are accumulated. `copies` is the same sequence of ops::linear() with
// WeightCopies, which differs only in the passes around the matrix products.
#include "compat/autocast.h"
#include "options.h"
#include "repeated.h"
#include "side_by_side.h"

#include <reprise/ops/linear.h>
#include <reprise/ops/weight_copies.h>
#include <reprise/version.h>

#include <fmt/format.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace {

using reprise::ops::Activation;
using torch::Tensor;

enum class Kind { kLibTorch, kCopies, kFused };

/// A feed-forward layer with its data.
struct FeedForwardRun {
  FeedForwardRun(int64_t rows, int64_t width, torch::Device device,
                 Activation activation, Kind kind)
      : activation(activation), kind(kind) {
    torch::manual_seed(1);
    const auto options = torch::device(device);
    const auto random = [&](std::vector<int64_t> sizes) {
      return torch::randn(sizes, options).mul_(0.05).requires_grad_();
    };
    x = torch::randn({rows, width}, options.dtype(torch::kBFloat16))
            .requires_grad_();
    layers.weight1 = random({4 * width, width});
    layers.bias1 = random({4 * width});
    layers.weight2 = random({width, 4 * width});
    layers.bias2 = random({width});
    slope = torch::randn({rows, width}, options.dtype(torch::kBFloat16));
    if (kind == Kind::kLibTorch) return;
    copies = std::make_unique<reprise::WeightCopies>(
        std::vector<Tensor>{layers.weight1, layers.bias1, layers.weight2,
                            layers.bias2},
        torch::kBFloat16);
  }

  void step() const {
    reprise::compat::AutocastState state;
    state.cpu_enabled = state.cuda_enabled = true;
    state.cache_enabled = false;
    state.cpu_dtype = state.cuda_dtype = torch::kBFloat16;
    Tensor y;
    {
      const reprise::compat::AutocastGuard autocast(state);
      y = kind == Kind::kFused
              ? reprise::ops::feed_forward(x, layers, activation)
              : reprise::ops::fallback::feed_forward(x, layers, activation);
    }
    y.backward(slope);
  }

  Activation activation;
  Kind kind;
  Tensor x, slope;
  reprise::ops::FeedForwardLayers layers;
  std::unique_ptr<reprise::WeightCopies> copies;
};

}  // namespace

int main(int argc, char** argv) {
  std::string place = "cpu";
  int64_t rows = 512, width = 768;
  int repeats = 15;
  reprise::bench::Options(
      "Feed-forward layers by ops::feed_forward() and by LibTorch")
      .add_device(&place)
      .add_positive("--rows", &rows, "Number of tokens")
      .add_positive("--width", &width, "Width of the block")
      .add_positive("--repeats", &repeats, "Timed runs of each, alternating")
      .parse(argc, argv);
  const torch::Device device = reprise::bench::device_named(place);

  fmt::print(
      "LibTorch {}, {}, {} × {} × {}, bfloat16, forward and backward\n\n",
      reprise::libtorch_version(), place, rows, width, 4 * width);
  fmt::print("{:<12}{:>14}{:>12}{:>12}{:>20}{:>20}\n", "activation",
             "LibTorch, µs", "copies", "ours", "LibTorch / ours",
             "copies / ours");
  const std::pair<const char*, Activation> activations[] = {
      {"GELU tanh", Activation::kGeluTanh}, {"GELU", Activation::kGelu}};
  for (const auto& [name, activation] : activations) {
    const auto run = [&](Kind kind) {
      return FeedForwardRun(rows, width, device, activation, kind);
    };
    const FeedForwardRun ours = run(Kind::kFused), plain = run(Kind::kLibTorch),
                         copies = run(Kind::kCopies);
    constexpr int kTimes = 4;
    reprise::bench::Repeated first(device, kTimes, [&] { ours.step(); });
    reprise::bench::Repeated second(device, kTimes, [&] { plain.step(); });
    reprise::bench::Repeated third(device, kTimes, [&] { copies.step(); });
    const auto against = [&](reprise::bench::Repeated& other) {
      return reprise::bench::side_by_side([&] { first(); }, [&] { other(); },
                                          repeats);
    };
    const auto to_plain = against(second), to_copies = against(third);
    const double each = 1000.0 / kTimes;
    fmt::print("{:<12}{:>14.1f}{:>12.1f}{:>12.1f}{:>20.2f}{:>20.2f}\n", name,
               to_plain.second_ms.median * each,
               to_copies.second_ms.median * each,
               to_plain.first_ms.median * each, to_plain.ratio.median,
               to_copies.ratio.median);
  }
  return 0;
}
