#pragma once

#include <reprise/data/dataset.h>
#include <reprise/models/lora.h>
#include <reprise/models/model.h>
#include <reprise/train/options.h>

#include <cstdint>
#include <string>

namespace reprise {

/// A training by name: TrainOptions with a built-in model and a dataset. Plain data,
/// which the command fills and a run directory stores as JSON. Every member is
/// described in src/train/config/fields.cpp.
struct TrainConfig : TrainOptions {
  std::string model = "cnn-basic";  ///< one of model_list()
  ModelOptions model_options{};
  /// Paths of the plug-ins that the command has loaded, separated by ':'. Recorded, so that
  /// a run can be continued without naming them; the library loads none.
  std::string plugin{};
  std::string weights{};  ///< safetensors file to start from; empty: none
  LoraOptions lora{};     ///< adapters to train instead of the weights
  std::string adapter{};  ///< saved adapter to continue from; empty: none
  std::string data{};     ///< DataOptions::name; empty: "random"
  int64_t random_samples = 512;  ///< number of samples in "random"
  /// See DataOptions. A language model with padded or packed documents takes segments;
  /// the built-in ones do.
  DocumentMode documents = DocumentMode::kStream;
  int64_t document_end = -1;

  /// Checks and completes the configuration as TrainOptions::resolve() does. Sets all
  /// options of the model's own.
  void resolve();

  /// True if the training is on random data, which has nothing to be evaluated on.
  bool is_random_data() const;
};

/// JSON object with one key per field, named as on the command line.
std::string to_json(const TrainConfig& config);

/// Reads such an object. Throws c10::Error if a field is missing that must match on
/// resume, or if a value has another type. Other missing fields get their defaults.
TrainConfig config_from_json(const std::string& text);

/// The first field that differs but must match for a run with `now` to continue
/// one with `saved`: `model was "gpt2", now "bert-base"`. Empty: there is none.
std::string conflict(const TrainConfig& saved, const TrainConfig& now);

}  // namespace reprise
