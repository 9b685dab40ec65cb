#include "train/loop/components.h"

#include "base/limits.h"
#include "compat/cuda.h"
#include "ops/tf32x3_gemm.h"
#include "recompute/tied_gradients.h"
#include "train/optim/registry.h"

#include <reprise/memory/process_memory.h>
#include <reprise/models/weights.h>
#include <reprise/ops/linear.h>
#include <reprise/recompute/host_memory.h>
#include <reprise/recompute/stage_costs.h>
#include <reprise/recompute/strategy.h>

#include <ATen/Parallel.h>
#include <torch/nn/modules/embedding.h>
#include <torch/utils.h>

#include <algorithm>
#include <set>

namespace reprise::detail {
namespace {

bool is_token_task(Task task) {
  return task == Task::kLanguage || task == Task::kSequences;
}

/// The weights of convolutions, in their places.
void lay_channels_last(Model& model) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model.root->parameters()) {
    if (parameter.dim() != 4) continue;
    parameter.set_data(parameter.contiguous(at::MemoryFormat::ChannelsLast));
  }
}

}  // namespace

torch::Device check_device(const TrainConfig& config) {
  torch::Device device(config.device);
  if (device.is_cuda() && !device.has_index()) device.set_index(0);
  TORCH_CHECK(device.is_cpu() || device.is_cuda(),
              "[--device] expected cpu, cuda or cuda:N, got ", config.device);
  TORCH_CHECK(!device.is_cuda() || device.index() < compat::cuda_device_count(),
              "[--device] expected one of ", compat::cuda_device_count(),
              " CUDA devices, got ", config.device);
  TORCH_CHECK(config.precision != Precision::kFp16 || device.is_cuda(),
              "[--precision] fp16 needs a CUDA device; on the CPU use bf16");
  return device;
}

std::shared_ptr<HostStore> host_store_of(const TrainConfig& config,
                                         torch::Device device) {
  if (!device.is_cuda() || config.host_memory == HostMemoryMode::kOff)
    return nullptr;
  int64_t free = available_memory();
  if (const int64_t allowed = process_limits().memory_bytes; allowed > 0) {
    free = std::min(free, allowed - process_memory().rss);
  }
  if (free <= 0) return nullptr;
  return make_host_store(device.index(), free / 2);
}

Model build_model(const TrainConfig& config, torch::Device device,
                  const std::shared_ptr<HostStore>& host) {
  if (config.threads > 0) at::set_num_threads(config.threads);
  torch::manual_seed(config.seed);
  Model model = make_model(config.model, config.model_options);
  if (!config.weights.empty()) load_weights(model, config.weights);
  if (device.is_cuda()) {
    compat::set_cuda_libraries({config.tf32, config.autotune});
    allow_split_products(config.fp32_products == Fp32Products::kAuto &&
                         !config.tf32);
  }
  model.root->to(device);
  if (config.layout == ImageLayout::kChannelsLast) lay_channels_last(model);
  if (device.is_cuda() && config.weight_copies != WeightCopiesMode::kOff) {
    for (const auto& group : model.groups()) pack_contiguous(group);
  }
  model.root->train();
  if (host) model.chain = with_host_variants(model.chain, host);
  return model;
}

NamedTensors named(const torch::OrderedDict<std::string, torch::Tensor>& dict) {
  NamedTensors list;
  for (const auto& item : dict) list.emplace_back(item.key(), item.value());
  return list;
}

std::vector<torch::Tensor> values(const NamedTensors& named) {
  std::vector<torch::Tensor> list;
  for (const auto& [name, tensor] : named) list.push_back(tensor);
  return list;
}

std::unique_ptr<Optimizer> optimizer_of(const TrainConfig& config,
                                        const Model& model) {
  const NamedTensors parameters = named(model.root->named_parameters());
  OptimizerOptions options = config.optimizer;
  std::set<const c10::TensorImpl*> embeddings;
  if (find_optimizer(options.name).quantized && !config.quantize_embeddings) {
    for (const auto& module : model.root->modules()) {
      const auto* embedding = module->as<torch::nn::Embedding>();
      if (embedding != nullptr) {
        embeddings.insert(embedding->weight.unsafeGetTensorImpl());
      }
    }
  }
  for (const auto& [name, parameter] : parameters) {
    if (embeddings.count(parameter.unsafeGetTensorImpl()) > 0) {
      options.unquantized.push_back(name);
    }
  }
  return make_optimizer(options, parameters);
}

std::shared_ptr<const Dataset> open_data(const TrainConfig& config,
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
  return open_dataset(options);
}

PrepareOptions prepare_of(const TrainConfig& config, const Model& model,
                          const Dataset& data) {
  PrepareOptions options;
  options.image_size = is_token_task(model.task) ? 0 : model.options.image_size;
  options.mean = data.mean();
  options.deviation = data.deviation();
  options.pixel_targets = model.task == Task::kPixels;
  options.channels_last = config.layout == ImageLayout::kChannelsLast;
  return options;
}

LoaderOptions loading_of(const TrainConfig& config,
                         const PrepareOptions& prepare, torch::Device device) {
  LoaderOptions loading;
  loading.seed = config.seed;
  loading.workers = config.workers;
  loading.pin = device.is_cuda();
  if (config.resize == ResizePlace::kWorkers) {
    loading.transform = [prepare](Batch& batch) {
      reprise::prepare(batch, prepare);
    };
  }
  return loading;
}

compat::AutocastState autocast_of(Precision precision, torch::Device device) {
  compat::AutocastState state;
  if (precision == Precision::kFp32) return state;
  // A forward casts each weight once in any case, and the cache would hold the
  // copies of stages that are dropped until the whole forward has ended.
  state.cache_enabled = false;
  const auto type =
      precision == Precision::kBf16 ? torch::kBFloat16 : torch::kHalf;
  if (device.is_cuda()) {
    state.cuda_enabled = true;
    state.cuda_dtype = type;
  } else {
    state.cpu_enabled = true;
    state.cpu_dtype = type;
  }
  return state;
}

std::unique_ptr<WeightCopies> weight_copies_of(const TrainConfig& config,
                                               Precision precision,
                                               const Model& model,
                                               torch::Device device) {
  const WeightCopiesMode mode = config.weight_copies;
  const bool wanted = mode == WeightCopiesMode::kAuto
                          ? device.is_cuda()
                          : mode != WeightCopiesMode::kOff;
  if (!wanted || !model.linear_parameters) return nullptr;
  const auto type = precision == Precision::kFp32   ? torch::kFloat
                    : precision == Precision::kBf16 ? torch::kBFloat16
                                                    : torch::kHalf;
  WeightCopiesOptions options;
  options.each_use = mode == WeightCopiesMode::kEach;
  for (const auto& tied : tied_parameters(model.chain)) {
    options.used_elsewhere.push_back(tied.parameter);
  }
  if (model.embeddings) options.straight = model.embeddings();
  return std::make_unique<WeightCopies>(model.linear_parameters(), type,
                                        options);
}

Schedule schedule_of(const TrainConfig& config, const Model& model,
                     const Dataset& data, torch::Device device) {
  const int stages = model.chain.size();
  if (config.plans_schedule()) return make_schedule("none", stages);
  if (is_schedule_text(config.recompute)) {
    return make_schedule(config.recompute, stages);
  }
  const Strategy strategy = Strategy::parse(config.recompute);
  if (strategy.kind != StrategyKind::kCheckpoints) {
    return make_schedule(strategy, stages);
  }
  // Two samples: BatchNorm cannot do with one.
  Batch batch = data.get({0, std::min<int64_t>(1, data.size() - 1)});
  move_to(batch, device);
  prepare(batch, prepare_of(config, model, data));
  const compat::AutocastGuard autocast(autocast_of(config.precision, device));
  return make_schedule(
      strategy, stages,
      output_bytes(model.chain, {batch.inputs, batch.targets}));
}

LrScheduleOptions rate_of(const TrainConfig& config) {
  LrScheduleOptions rate = config.rate;
  rate.base = scale_rate(
      rate.base, config.scale_lr, static_cast<double>(config.global_batch),
      static_cast<double>(std::max<int64_t>(config.base_batch, 1)));
  return rate;
}

GradScaler::Options scaler_of(const TrainConfig& config) {
  GradScaler::Options options;
  options.enabled = config.precision == Precision::kFp16;
  options.scale = config.loss_scale;
  return options;
}

}  // namespace reprise::detail
