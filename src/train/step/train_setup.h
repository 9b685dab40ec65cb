#pragma once

#include "compat/autocast.h"
#include "distributed/sharded_parameters.h"
#include "memory/host_tensors.h"
#include "recompute/host_parameters.h"
#include "train/config/check_device.h"
#include "train/step/window_snapshot.h"

#include <reprise/data/dataset.h>
#include <reprise/data/loader.h>
#include <reprise/data/safetensors.h>
#include <reprise/memory/host_store.h>
#include <reprise/models/model.h>
#include <reprise/ops/weight_copies.h>
#include <reprise/train/config.h>
#include <reprise/train/scaler.h>
#include <reprise/train/trainer.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

/// The objects that a training works on, and functions that create its
/// components from the options. The trainer, the planner and the profiler use
/// the same setup, so that measurements describe the actual training. Tested by
/// tests/train/loop/trainer_test.cpp.
namespace reprise::detail {

/// Model, data and options of a training, ready on its device. Copies share the
/// model's tensors and the data.
struct TrainSetup {
  TrainOptions options;  ///< the sizes in it change with the plan
  /// Settings that settle_device_settings() chose for the options.
  std::optional<DeviceSettings> settings{};
  torch::Device device;
  std::shared_ptr<HostStore> host{};  ///< for offloaded activations; null: none
  /// For the optimizer's state and the parameters; null: none.
  std::shared_ptr<HostTensors> state_memory{};
  /// The parameters, which it can move; null if it never does.
  std::shared_ptr<HostParameters> host_parameters{};
  /// Memory of the exchange with other ranks.
  ExchangeMemory exchange{}, exchange_of_graph{};
  /// The parameters, divided among the ranks; null if each has all of them.
  std::shared_ptr<ShardedParameters> sharded{};
  Model model;  ///< in training mode
  NamedTensors parameters{};
  std::vector<torch::Tensor> parameter_list{};  ///< the same without names
  compat::AutocastState autocast{};
  TrainData data{};
  /// See TrainInputs::optimizer.
  std::function<std::unique_ptr<Optimizer>(const NamedTensors&)>
      own_optimizer{};
  /// See TrainInputs::learning_rate.
  std::function<double(int64_t)> own_rate{};
  /// Datasets resident in host memory, which are excluded from memory counts.
  int64_t dataset_bytes = 0;
  /// State at the start of the current window. Its copies of the buffers are
  /// allocated when the setup is made, because plans count them.
  std::shared_ptr<WindowSnapshot> snapshot{};
};

/// Moves the model to `options.device`, applies the options for its memory
/// layout, and excludes resident datasets from memory counts. Throws c10::Error
/// if the options cannot be run: unknown device, precision that the device does
/// not support.
TrainSetup make_setup(TrainInputs inputs, const TrainOptions& options);

/// Overload for the built-in model and data that `config` names.
TrainSetup make_setup(const TrainConfig& config);

/// The host's part of a model that place_model() has placed; see TrainSetup.
struct PlacedOnHost {
  std::shared_ptr<HostStore> activations{};
  std::shared_ptr<HostTensors> state_memory{};
  std::shared_ptr<HostParameters> parameters{};
};

/// Makes a setup without a snapshot for a model that place_model() has placed.
TrainSetup assemble_setup(TrainInputs placed, const TrainOptions& options,
                          torch::Device device, PlacedOnHost host);

/// Applies the options of the device's libraries, and the memory layout of convolution
/// weights; kAuto leaves them as they are.
void apply_settings(Model& model, const TrainOptions& options,
                    torch::Device device);

/// Moves `model` to `device`, in training mode, with the settings of the options. Its stages
/// get a variant that offloads activations if the options allow it. Parameters go to host
/// memory instead if the options ask for it, or leave it open and the device has no room;
/// throws c10::OutOfMemoryError if the host has none either.
PlacedOnHost place_model(Model& model, const TrainOptions& options,
                         torch::Device device);

/// The parameters that are on the device only while their stages run; null if they stay there.
StageParameters* moving_parameters(const TrainSetup& setup);

NamedTensors named(const torch::OrderedDict<std::string, torch::Tensor>& dict);
std::vector<torch::Tensor> values(const NamedTensors& named);

/// What the optimizer of this process updates: the parameters, or this rank's pieces of them if
/// those are divided.
const NamedTensors& updated_parameters(const TrainSetup& setup);

/// Returns the optimizer of the training. An 8-bit optimizer does not quantize the
/// moments of embeddings unless `options.quantize_embeddings` is set.
std::unique_ptr<Optimizer> optimizer_of(const TrainSetup& setup);

/// A gradient of zeros: in the type of the parameter, or in float32 if the parameter is
/// rounded (ParameterType::kBf16).
torch::Tensor zero_gradient(const TrainSetup& setup,
                            const torch::Tensor& parameter);
/// Device memory of such a gradient; 0 if the parameter is elsewhere.
int64_t gradient_bytes(const TrainSetup& setup, const torch::Tensor& parameter);

/// Moves the state of the setup's optimizer to host memory. Returns why that is not possible
/// now; empty if it is done. Throws c10::Error if the options or the optimizer never allow it.
std::string move_state_to_host(Optimizer& optimizer, const TrainSetup& setup);

/// Returns an optimizer for measurements, with its state in host memory if
/// `options.state` is kHost. Throws c10::OutOfMemoryError if that has no room.
std::unique_ptr<Optimizer> measured_optimizer_of(const TrainSetup& setup);

/// Name of the optimizer for summaries; "own" for one of the caller.
std::string optimizer_name(const TrainSetup& setup);

/// Whether the data is a StreamDataset.
bool is_stream(const Dataset& data);

/// Converts a batch to the input of the model, unless that has been done.
void prepare_batch(const TrainSetup& setup, Batch& batch);

/// Returns loader options; the caller sets batch size and window.
LoaderOptions make_loader_options(const TrainSetup& setup);

compat::AutocastState autocast_of(Precision precision, torch::Device device);

/// The type that autocast computes in.
torch::ScalarType type_of(Precision precision);

/// Weights that the model reads only after a conversion to half precision, if autocast is on:
/// those of linear layers and convolutions that nothing else uses.
std::vector<torch::Tensor> weights_read_in_half(const Model& model);

/// Returns half-precision copies of the model's linear weights for training in
/// `precision`; null if `options.weight_copies` disables them. Parameters in host memory are
/// converted at each use.
std::unique_ptr<WeightCopies> weight_copies_of(const TrainSetup& setup,
                                               Precision precision);

/// Returns the schedule of the strategy `options.recompute`; for "optimal" and "auto" that
/// of "none", which a plan may replace. Strategies that depend on the sizes of the
/// stages' outputs run one micro-batch to measure them.
Schedule schedule_of(const TrainSetup& setup);

LrScheduleOptions lr_schedule_of(const TrainOptions& options);

/// Returns the learning rate of update `step`: that of the caller's function, else of
/// `schedule`.
double learning_rate(const TrainSetup& setup, const LrScheduleOptions& schedule,
                     int64_t step);

GradScaler::Options scaler_of(const TrainOptions& options);

}  // namespace reprise::detail
