#pragma once

#include <reprise/data/dataset.h>
#include <reprise/data/prepare.h>
#include <reprise/models/model.h>
#include <reprise/train/config.h>

#include <memory>
#include <string>

namespace reprise {

/// Datasets of a training and how their batches become the model's inputs.
struct TrainData {
  std::string name;  ///< for summaries, such as "mnist"
  std::shared_ptr<const Dataset> train;
  std::shared_ptr<const Dataset> test;  ///< null: no evaluation
  PrepareOptions prepare{};             ///< memory format is the trainer's
};

/// What is trained: a model, as modules and a chain that ends in the loss sum, and data.
struct TrainInputs {
  Model model;
  TrainData data;
};

/// Builds the built-in model that `config` names, on the host. Seeds LibTorch's generators
/// with `config.seed` first, so that equal configurations give equal weights. Throws
/// c10::Error on an unknown model, options it cannot take, or weights that do not fit.
Model make_train_model(const TrainConfig& config);

/// Opens the data that `config` names, as `model` needs it. Throws c10::Error if it cannot
/// be read or does not suit the model.
TrainData open_train_data(const TrainConfig& config, const Model& model);

/// Both.
TrainInputs make_inputs(const TrainConfig& config);

}  // namespace reprise
