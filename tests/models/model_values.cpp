// model_values NAME WEIGHTS VALUES: compares the loss and gradients of a model with those of
// the original, written by tests/fixtures/make_model_values.py --full. Exit status: 0 equal,
// 1 different, 2 usage error.
#include "compare_values.h"

#include <reprise/models/model.h>

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <iostream>
#include <map>
#include <stdexcept>
#include <string>

namespace {

constexpr const char* kUsage =
    "model_values NAME WEIGHTS VALUES [--device D] [--precision double|single] "
    "[--tolerance T] [--depth N] [--width N] [--heads N] [--kv-heads N] "
    "[--mlp-width N] [--classes N] [--vocab N] [--seq N] "
    "[--image-size N] [--channels N]\n";
constexpr double kLossTolerance = 1e-5;

struct Arguments {
  std::string name, weights, values;
  reprise::ModelOptions options;
  torch::Device device = torch::kCPU;
  // In float64 differences come from the model, not from rounding.
  torch::ScalarType type = torch::kDouble;
  double tolerance = 1e-4;  // of gradients
};

Arguments parse(int argc, char** argv) {
  if (argc < 4 || argc % 2 != 0) throw std::invalid_argument("count");
  Arguments arguments;
  arguments.name = argv[1];
  arguments.weights = argv[2];
  arguments.values = argv[3];
  auto& options = arguments.options;
  const std::map<std::string, int64_t*> counts = {
      {"--depth", &options.depth},           {"--width", &options.width},
      {"--heads", &options.heads},           {"--kv-heads", &options.kv_heads},
      {"--mlp-width", &options.mlp_width},   {"--classes", &options.classes},
      {"--vocab", &options.vocab},           {"--seq", &options.seq},
      {"--image-size", &options.image_size}, {"--channels", &options.channels}};
  for (int i = 4; i < argc; i += 2) {
    const std::string key = argv[i];
    if (key == "--device") {
      arguments.device = torch::Device(argv[i + 1]);
    } else if (key == "--precision") {
      const std::string precision = argv[i + 1];
      if (precision != "double" && precision != "single") {
        throw std::invalid_argument("precision");
      }
      arguments.type = precision == "double" ? torch::kDouble : torch::kFloat;
    } else if (key == "--tolerance") {
      arguments.tolerance = std::stod(argv[i + 1]);
    } else {
      *counts.at(key) = std::stoll(argv[i + 1]);
    }
  }
  return arguments;
}

bool compare(Arguments arguments) {
  // Some models have no dropout option.
  arguments.options.dropout =
      reprise::make_model(arguments.name, arguments.options).options.dropout < 0
          ? -1
          : 0;
  auto model = reprise::make_model(arguments.name, arguments.options);
  reprise::load_weights(model, arguments.weights);
  bool same = true;
  for (const char* strategy : {"none", "sqrt"}) {
    const auto report = reprise::testing::compare_values(
        model, arguments.values, strategy,
        torch::TensorOptions(arguments.device).dtype(arguments.type));
    std::cout << arguments.name << ", " << strategy << ": "
              << report.to_string();
    same = same && report.loss_difference <= kLossTolerance &&
           report.largest() <= arguments.tolerance;
  }
  std::cout << (same ? "same" : "DIFFERENT") << "\n";
  return same;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  try {
    arguments = parse(argc, argv);
  } catch (const std::exception&) {
    std::cerr << kUsage;
    return 2;
  }
  try {
    // The same settings as in the script that wrote the values.
    at::globalContext().setAllowTF32CuDNN(false);
    at::globalContext().setDeterministicCuDNN(true);
    return compare(arguments) ? 0 : 1;
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
    return 1;
  }
}
