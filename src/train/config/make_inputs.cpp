// Tested by tests/train/loop/trainer_test.cpp.
#include "models/model_spec.h"
#include "train/config/check_device.h"

#include <reprise/models/model.h>
#include <reprise/train/inputs.h>

#include <ATen/Parallel.h>
#include <torch/utils.h>

#include <algorithm>

namespace reprise {
namespace {

bool is_token_task(Task task) {
  return task == Task::kLanguage || task == Task::kSequences;
}

std::shared_ptr<const Dataset> open_split(const TrainConfig& config,
                                          const Model& model, Split split) {
  DataOptions options;
  options.name = config.data;
  options.split = split;
  options.tokens = is_token_task(model.task);
  options.classify = model.task == Task::kSequences;
  options.seq = model.options.seq;
  options.vocab = model.options.vocab;
  // One class of pixels is the background.
  options.classes = model.options.classes - (model.task == Task::kPixels);
  options.channels = std::max<int64_t>(model.options.channels, 1);
  options.random_samples = config.random_samples;
  options.seed = config.seed;
  options.documents = config.documents;
  options.document_end = config.document_end;
  return open_dataset(options);
}

/// Whether the test split is evaluated. Random data has nothing to learn, so it is
/// evaluated only on request.
bool evaluates(const TrainConfig& config) {
  return config.evaluate && (!config.is_random_data() || config.eval_every > 0);
}

}  // namespace

Model make_train_model(const TrainConfig& config) {
  detail::check_device(config);  // before minutes are spent on a large model
  if (config.threads > 0) at::set_num_threads(config.threads);
  torch::manual_seed(config.seed);
  Model model = make_model(config.model, config.model_options);
  if (!config.weights.empty()) load_weights(model, config.weights);
  if (!config.adapter.empty()) {
    load_lora(model, config.adapter);
  } else if (config.lora.rank > 0) {
    add_lora(model, config.lora);
  }
  return model;
}

TrainData open_train_data(const TrainConfig& config, const Model& model) {
  TrainData data;
  data.name = config.data;
  data.train = open_split(config, model, Split::kTrain);
  // Opened now, so that a missing test split does not end a training hours later.
  if (evaluates(config)) data.test = open_split(config, model, Split::kTest);
  const DatasetEntry* entry = find_dataset(config.data);
  if (entry != nullptr && entry->prepare) {
    data.prepare = entry->prepare;
    return data;
  }
  if (model.task == Task::kOther) return data;  // as its dataset has it
  PrepareOptions options;
  options.image_size = is_token_task(model.task) ? 0 : model.options.image_size;
  options.mean = data.train->mean();
  options.stddev = data.train->stddev();
  options.pixel_targets = model.task == Task::kPixels;
  data.prepare = [options](Batch& batch) { prepare(batch, options); };
  return data;
}

TrainInputs make_inputs(const TrainConfig& config) {
  TrainInputs inputs{make_train_model(config), {}};
  inputs.data = open_train_data(config, inputs.model);
  inputs.check_model = detail::find_model_spec(config.model) == nullptr;
  return inputs;
}

}  // namespace reprise
