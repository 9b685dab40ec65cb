// Trains a PyTorch model, split into stages by split_model.py, within a memory budget:
//
//   python3 split_model.py stages
//   script_example stages 40MiB
//
// The data is random, shaped for the model that split_model.py has as a demonstration.
#include <reprise/train.h>

#include <torch/utils.h>

#include <exception>
#include <iostream>
#include <memory>
#include <string>

int main(int argc, char** argv) try {
  if (argc != 3) {
    std::cerr << "usage: script_example DIRECTORY BUDGET\n";
    return 2;
  }
  const std::string directory = argv[1];

  reprise::TrainOptions options;
  options.batch = 64;  // with global_batch instead, it is planned as well
  options.accumulate = 1;
  options.memory_limit = reprise::parse_bytes(argv[2]);
  options.steps = 20;
  options.rate.base = 0.05;
  options.eval_every = 20;

  const auto inputs = [&](const reprise::TrainOptions& resolved) {
    torch::manual_seed(resolved.seed);  // dropout
    reprise::DataOptions data;
    data.name = "random";
    data.channels = 3;
    data.random_side = 32;
    data.random_samples = 64;
    data.classes = 10;
    const auto images = reprise::open_dataset(data);
    const reprise::PrepareOptions prepare{.mean = images->mean(),
                                          .stddev = images->stddev()};
    reprise::TrainData random{"random", images, images};
    random.prepare = [prepare](reprise::Batch& batch) {
      reprise::prepare(batch, prepare);
    };
    return reprise::TrainInputs{reprise::load_script_model(directory), random};
  };
  const auto summary = reprise::run_training(options, inputs).training.summary;

  std::cout << summary.model << ": loss " << *summary.loss << ", accuracy "
            << summary.eval_metrics.at("accuracy") << ", peak "
            << reprise::format_bytes(summary.peak_bytes) << " of "
            << reprise::format_bytes(options.memory_limit) << "\n";
  return summary.peak_bytes <= options.memory_limit ? 0 : 1;
} catch (const c10::Error& error) {
  std::cerr << "script_example: " << error.what_without_backtrace() << "\n";
  return 1;
} catch (const std::exception& error) {
  std::cerr << "script_example: " << error.what() << "\n";
  return 1;
}
