#pragma once

#include "compat/autocast.h"

#include <reprise/data/dataset.h>
#include <reprise/data/loader.h>
#include <reprise/data/prepare.h>
#include <reprise/data/safetensors.h>
#include <reprise/memory/host_store.h>
#include <reprise/models/model.h>
#include <reprise/ops/weight_copies.h>
#include <reprise/train/config.h>
#include <reprise/train/scaler.h>

#include <memory>
#include <string>
#include <vector>

/// The parts of a training, made from its configuration. What trains, profiles
/// or plans starts from the same ones.
namespace reprise::detail {

/// Throws c10::Error where the machine has no such device, or the device not the
/// precision.
torch::Device check_device(const TrainConfig& config);

/// Where plans may keep activations in the host's memory; null: nowhere.
std::shared_ptr<HostStore> host_store_of(const TrainConfig& config,
                                         torch::Device device);

/// Seeded, with its weights, on the device, in training mode. With `host` its stages
/// have a variant that keeps its tensors there.
Model build_model(const TrainConfig& config, torch::Device device,
                  const std::shared_ptr<HostStore>& host = nullptr);

NamedTensors named(const torch::OrderedDict<std::string, torch::Tensor>& dict);
std::vector<torch::Tensor> values(const NamedTensors& named);

/// `config.optimizer`'s, for the parameters of `model`: with 8-bit moments, those
/// of embeddings stay whole unless `config.quantize_embeddings`.
std::unique_ptr<Optimizer> optimizer_of(const TrainConfig& config,
                                        const Model& model);

std::shared_ptr<const Dataset> open_data(const TrainConfig& config,
                                         const Model& model, Split split);

PrepareOptions prepare_of(const TrainConfig& config, const Model& model,
                          const Dataset& data);

/// How batches are read; their size and the window are the caller's.
LoaderOptions loading_of(const TrainConfig& config,
                         const PrepareOptions& prepare, torch::Device device);

compat::AutocastState autocast_of(Precision precision, torch::Device device);

/// Copies of the model's linear weights for a training in `precision`; null where
/// `config.weight_copies` wants none.
std::unique_ptr<WeightCopies> weight_copies_of(const TrainConfig& config,
                                               Precision precision,
                                               const Model& model,
                                               torch::Device device);

/// The schedule that `config.recompute` names; with a plan to come, "none" until
/// it is there. Looks at the sizes of the stages' outputs where the strategy
/// depends on them.
Schedule schedule_of(const TrainConfig& config, const Model& model,
                     const Dataset& data, torch::Device device);

LrScheduleOptions rate_of(const TrainConfig& config);

GradScaler::Options scaler_of(const TrainConfig& config);

}  // namespace reprise::detail
