#pragma once

#include <reprise/data/dataset.h>
#include <reprise/models/model.h>
#include <reprise/train/config.h>
#include <reprise/train/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace reprise {

/// Datasets of a training and the conversion of their batches to model inputs.
struct TrainData {
  std::string name;  ///< for summaries, such as "mnist"
  std::shared_ptr<const Dataset> train;
  std::shared_ptr<const Dataset> test{};  ///< null: no evaluation
  /// Applied once to every batch, without gradients: on the training device, or in
  /// the loader's threads with ResizePlace::kWorkers, then by several at once.
  /// Null: nothing to convert.
  std::function<void(Batch&)> prepare{};
};

/// Model, data and optimizer of a training.
struct TrainInputs {
  Model model;
  TrainData data;
  /// Makes the optimizer of these parameters, which are on the device; called
  /// several times if the training is planned. Null: the optimizer of the options.
  /// An own optimizer cannot be sharded, and its costs are not stored on disk.
  std::function<std::unique_ptr<Optimizer>(const NamedTensors& parameters)>
      optimizer{};
  /// Learning rate of update `step`, counted from 0: must not be negative, and must
  /// depend on nothing else, because a resumed run asks again. Null: the schedule of the
  /// options.
  std::function<double(int64_t step)> learning_rate{};
  /// Run the chain on two samples first, and refuse it with an explanation if it cannot
  /// be trained (check_chain(), check_loss()). Off for built-in models.
  bool check_model = true;
};

/// Builds the built-in model that `config` names, in host memory. Seeds
/// LibTorch's random generators with `config.seed` first, so that equal
/// configurations give equal weights. Throws c10::Error if the model is
/// unknown, does not support its options, or does not match the weights to
/// load.
Model make_train_model(const TrainConfig& config);

/// Opens the data that `config` names in the form that `model` expects. Throws
/// c10::Error if it cannot be read or does not match the model.
TrainData open_train_data(const TrainConfig& config, const Model& model);

/// Builds the model and opens the data that `config` names. Throws as
/// make_train_model() and open_train_data() do.
TrainInputs make_inputs(const TrainConfig& config);

}  // namespace reprise
