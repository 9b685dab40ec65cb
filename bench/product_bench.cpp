// Products of single precision: those on tensor cores (split_products.h) beside the
// library's. For each layer, forward and backward (three products) with gradients that
// are added to, as in a window; and how far its output is from that in double precision.
// On other devices than those they are for, both are the library's.
#include "side_by_side.h"

#include <reprise/lean/linear.h>
#include <reprise/lean/split_products.h>
#include <reprise/lean/weight_copies.h>
#include <reprise/torch/cuda.h>
#include <reprise/torch/cuda_graph.h>
#include <reprise/torch/version.h>

#include <CLI/CLI.hpp>
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

/// Of a block of that width.
std::vector<Layer> layers_of(int64_t width) {
  return {{"queries, keys, values", width, 3 * width},
          {"attention's output", width, width},
          {"MLP, first", width, 4 * width},
          {"MLP, second", 4 * width, width}};
}

/// One layer, ready to run many times.
class Run {
 public:
  Run(const Layer& layer, int64_t rows, torch::Device device, bool split)
      : device_(device), split_(split), stream_(device, device.is_cuda()) {
    torch::manual_seed(1);
    const auto options = torch::device(device);
    x_ = torch::randn({rows, layer.in}, options).requires_grad_();
    weight_ = torch::randn({layer.out, layer.in}, options).requires_grad_();
    bias_ = torch::randn({layer.out}, options).requires_grad_();
    slope_ = torch::randn({rows, layer.out}, options);
    copies_ = std::make_unique<reprise::WeightCopies>(
        std::vector<Tensor>{weight_, bias_}, torch::kFloat);
    step();
    step();
    if (!device.is_cuda()) return;
    graph_ = std::make_unique<reprise::compat::CudaGraph>(
        device.index(), std::make_shared<reprise::compat::CudaGraphPool>());
    graph_->capture([this] { steps(); });
  }

  /// kSteps times, to the end.
  void operator()() {
    if (graph_) {
      graph_->replay();
      reprise::compat::cuda_synchronize(device_.index());
    } else {
      steps();
    }
  }

  double error() {
    const torch::NoGradGuard no_grad;
    reprise::allow_split_products(split_);
    const auto wide = [](const Tensor& tensor) {
      return tensor.to(torch::kDouble);
    };
    const Tensor exact = torch::addmm(wide(bias_), wide(x_), wide(weight_).t());
    const Tensor y = reprise::lean_linear(x_, weight_, bias_);
    return ((wide(y) - exact).norm() / exact.norm()).item<double>();
  }

  static constexpr int kSteps = 10;

 private:
  void step() {
    reprise::allow_split_products(split_);
    reprise::lean_linear(x_, weight_, bias_).backward(slope_);
  }
  void steps() {
    for (int i = 0; i < kSteps; ++i) step();
  }

  torch::Device device_;
  bool split_;
  reprise::compat::GraphStreamScope stream_;
  Tensor x_, weight_, bias_, slope_;
  std::unique_ptr<reprise::WeightCopies> copies_;
  std::unique_ptr<reprise::compat::CudaGraph> graph_;
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Products of single precision on tensor cores, and the library's");
  std::string place = "cpu";
  int64_t rows = 512, width = 1024;
  int repeats = 31;
  app.add_option("--device", place, "cpu or cuda")->capture_default_str();
  app.add_option("--rows", rows, "Tokens")->capture_default_str();
  app.add_option("--width", width, "Of the block")->capture_default_str();
  app.add_option("--repeats", repeats, "Of both, in turn")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  torch::Device device(place);
  if (device.is_cuda() && !device.has_index()) device.set_index(0);

  fmt::print("LibTorch {}, {}, {} rows, forward and backward{}\n\n",
             reprise::compat::libtorch_version(), place, rows,
             reprise::takes_split_products(device)
                 ? ""
                 : ": both the library's on this device");
  fmt::print("{:<24}{:>14}{:>12}{:>10}{:>12}{:>12}\n", "layer", "library, µs",
             "ours, µs", "ratio", "error", "ours");
  for (const Layer& layer : layers_of(width)) {
    Run ours(layer, rows, device, true), library(layer, rows, device, false);
    const auto times = reprise::bench::side_by_side(
        [&] { ours(); }, [&] { library(); }, repeats);
    const double each = 1000.0 / Run::kSteps;
    fmt::print("{:<24}{:>14.1f}{:>12.1f}{:>10.2f}{:>12.1e}{:>12.1e}\n",
               layer.name, times.second_ms.median * each,
               times.first_ms.median * each, times.ratio.median,
               library.error(), ours.error());
  }
  return 0;
}
