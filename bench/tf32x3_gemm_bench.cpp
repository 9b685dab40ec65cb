// Float32 matrix products on tensor cores (ops/tf32x3_gemm.h) compared with the library's.
// For each layer: the time of forward and backward (three products), with gradients that are
// accumulated, and the error of the output relative to float64. On devices that the kernel
// does not support, both are the library's.
#include "ops/tf32x3_gemm.h"
#include "options.h"
#include "repeated.h"
#include "side_by_side.h"

#include <reprise/ops/linear.h>
#include <reprise/ops/weight_copies.h>
#include <reprise/version.h>

#include <fmt/format.h>
#include <torch/types.h>

#include <memory>
#include <string>
#include <vector>

namespace {

using torch::Tensor;

struct Layer {
  std::string name;
  int64_t in = 0, out = 0;
};

/// Linear layers of a transformer block.
std::vector<Layer> layers_of(int64_t width) {
  return {{"queries, keys, values", width, 3 * width},
          {"attention output", width, width},
          {"MLP, first", width, 4 * width},
          {"MLP, second", 4 * width, width}};
}

/// A layer with its data, computed by the kernel or by the library.
struct LayerRun {
  LayerRun(const Layer& layer, int64_t rows, torch::Device device, bool kernel)
      : kernel(kernel) {
    torch::manual_seed(1);
    const auto options = torch::device(device);
    x = torch::randn({rows, layer.in}, options).requires_grad_();
    weight = torch::randn({layer.out, layer.in}, options).requires_grad_();
    bias = torch::randn({layer.out}, options).requires_grad_();
    slope = torch::randn({rows, layer.out}, options);
    copies = std::make_unique<reprise::WeightCopies>(
        std::vector<Tensor>{weight, bias}, torch::kFloat);
  }

  void step() const {
    reprise::detail::allow_tf32x3_gemm(kernel);
    reprise::ops::linear(x, weight, bias).backward(slope);
  }
  double error() const {
    const torch::NoGradGuard no_grad;
    reprise::detail::allow_tf32x3_gemm(kernel);
    const auto wide = [](const Tensor& tensor) {
      return tensor.to(torch::kDouble);
    };
    const Tensor exact = torch::addmm(wide(bias), wide(x), wide(weight).t());
    const Tensor y = reprise::ops::linear(x, weight, bias);
    return ((wide(y) - exact).norm() / exact.norm()).item<double>();
  }

  bool kernel;
  Tensor x, weight, bias, slope;
  std::unique_ptr<reprise::WeightCopies> copies;
};

}  // namespace

int main(int argc, char** argv) {
  std::string place = "cpu";
  int64_t rows = 512, width = 1024;
  int repeats = 31;
  reprise::bench::Options(
      "Float32 matrix products on tensor cores and by the library")
      .add_device(&place)
      .add_positive("--rows", &rows, "Number of tokens")
      .add_positive("--width", &width, "Width of the block")
      .add_positive("--repeats", &repeats, "Timed runs of each, alternating")
      .parse(argc, argv);
  const torch::Device device = reprise::bench::device_named(place);

  fmt::print("LibTorch {}, {}, {} rows, forward and backward{}\n\n",
             reprise::libtorch_version(), place, rows,
             reprise::detail::uses_tf32x3_gemm(device)
                 ? ""
                 : "; the library computes both on this device");
  fmt::print("{:<24}{:>14}{:>12}{:>10}{:>12}{:>12}\n", "layer", "library, µs",
             "ours, µs", "ratio", "error", "ours");
  for (const Layer& layer : layers_of(width)) {
    const LayerRun ours(layer, rows, device, true);
    const LayerRun library(layer, rows, device, false);
    reprise::bench::Repeated first(device, 10, [&] { ours.step(); });
    reprise::bench::Repeated second(device, 10, [&] { library.step(); });
    const auto times = reprise::bench::side_by_side([&] { first(); },
                                                    [&] { second(); }, repeats);
    const double each = 1000.0 / first.times();
    fmt::print("{:<24}{:>14.1f}{:>12.1f}{:>10.2f}{:>12.1e}{:>12.1e}\n",
               layer.name, times.second_ms.median * each,
               times.first_ms.median * each, times.ratio.median,
               library.error(), ours.error());
  }
  return 0;
}
