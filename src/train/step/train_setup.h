#pragma once

#include "compat/autocast.h"
#include "train/step/window_snapshot.h"

#include <reprise/data/dataset.h>
#include <reprise/data/loader.h>
#include <reprise/data/prepare.h>
#include <reprise/data/safetensors.h>
#include <reprise/memory/host_store.h>
#include <reprise/models/model.h>
#include <reprise/ops/weight_copies.h>
#include <reprise/train/config.h>
#include <reprise/train/scaler.h>
#include <reprise/train/trainer.h>

#include <memory>
#include <string>
#include <vector>

/// The objects a training works on, and how its options turn into parts. The trainer,
/// the planner and the profiler all start from the same setup, so that what is measured
/// is what is trained.
namespace reprise::detail {

/// Model, data and options of a training, ready on its device. Copies share the model's
/// tensors and the data.
struct TrainSetup {
  TrainConfig options;  ///< a plan changes the sizes in it
  torch::Device device;
  std::shared_ptr<HostStore> host;  ///< for offloaded activations; null: none
  Model model;                      ///< in training mode
  NamedTensors parameters;
  std::vector<torch::Tensor> parameter_list;  ///< the same without names
  compat::AutocastState autocast;
  TrainData data;
  int64_t dataset_bytes =
      0;  ///< resident on the host, excluded from all counts
  /// State at the start of the current window. Its copies of the buffers exist from the
  /// beginning, since plans count them.
  std::shared_ptr<WindowSnapshot> snapshot;
};

/// Moves the model to `options.device`, applies the options that concern its storage and
/// excludes the resident datasets from memory counts. Throws c10::Error if the options
/// cannot be run: unknown device, precision that the device lacks.
TrainSetup make_setup(TrainInputs inputs, const TrainConfig& options);

/// The setup of the built-in model and data that `config` names.
TrainSetup make_setup(const TrainConfig& config);

/// The same for a model that place_model() has placed already; without a snapshot.
TrainSetup assemble_setup(TrainInputs placed, const TrainConfig& options,
                          torch::Device device,
                          std::shared_ptr<HostStore> host);

/// Device named by the options, with its index. Throws c10::Error if the machine does not
/// have it, or if it does not support the precision.
torch::Device check_device(const TrainConfig& options);

/// Store for activations in host memory; null if the options or the device do not allow it.
std::shared_ptr<HostStore> host_store_of(const TrainConfig& options,
                                         torch::Device device);

/// Moves `model` to `device`, in training mode, with the memory layout of the options.
/// With `host`, its stages get a variant that offloads to it.
void place_model(Model& model, const TrainConfig& options, torch::Device device,
                 const std::shared_ptr<HostStore>& host);

NamedTensors named(const torch::OrderedDict<std::string, torch::Tensor>& dict);
std::vector<torch::Tensor> values(const NamedTensors& named);

/// Optimizer of the options for the parameters of `model`. With 8-bit moments, the
/// moments of embeddings stay unquantized unless `options.quantize_embeddings`.
std::unique_ptr<Optimizer> optimizer_of(const TrainConfig& options,
                                        const Model& model);

/// Loader options without batch size and window, which are the caller's.
LoaderOptions make_loader_options(const TrainConfig& options,
                                  const PrepareOptions& prepare,
                                  torch::Device device);

compat::AutocastState autocast_of(Precision precision, torch::Device device);

/// Half-precision copies of the model's linear weights for training in `precision`; null
/// if `options.weight_copies` does not ask for them.
std::unique_ptr<WeightCopies> weight_copies_of(const TrainConfig& options,
                                               Precision precision,
                                               const Model& model,
                                               torch::Device device);

/// Schedule that `options.recompute` names; "none" until a plan replaces it. Strategies
/// that depend on the sizes of the stages' outputs run one micro-batch to learn them.
Schedule schedule_of(const TrainSetup& setup);

LrScheduleOptions lr_schedule_of(const TrainConfig& options);

GradScaler::Options scaler_of(const TrainConfig& options);

}  // namespace reprise::detail
