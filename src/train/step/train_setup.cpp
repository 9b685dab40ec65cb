#include "train/step/train_setup.h"

#include "base/limits.h"
#include "compat/cuda.h"
#include "compat/lt_gemm.h"
#include "data/batch_check.h"
#include "ops/tf32x3_gemm.h"
#include "recompute/tied_gradients.h"
#include "train/config/update_refusal.h"
#include "train/optim/partial_optimizer.h"
#include "train/optim/registry.h"
#include "train/step/model_checks.h"
#include "train/step/oom_retry.h"

#include <reprise/base/bytes.h>
#include <reprise/data/stream.h>
#include <reprise/memory/meter.h>
#include <reprise/ops/linear.h>
#include <reprise/recompute/host_memory.h>
#include <reprise/recompute/stage_costs.h>
#include <reprise/recompute/strategy.h>

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

namespace reprise::detail {
namespace {

/// Changes the memory format of the convolutions' weights in place.
void set_weight_layout(Model& model, ImageLayout layout) {
  if (layout == ImageLayout::kAuto) return;
  const torch::NoGradGuard no_grad;
  const auto format = layout == ImageLayout::kChannelsLast
                          ? at::MemoryFormat::ChannelsLast
                          : at::MemoryFormat::Contiguous;
  for (auto& parameter : model.root->parameters()) {
    if (parameter.dim() != 4 || parameter.is_contiguous(format)) continue;
    parameter.set_data(parameter.contiguous(format));
  }
}

void check_data(const TrainData& data, const TrainOptions& options) {
  TORCH_CHECK(data.train->size() > 0 && data.train->epoch_size() > 0,
              "[Trainer] expected training data with samples, got a size of ",
              std::min(data.train->size(), data.train->epoch_size()));
  TORCH_CHECK(!is_stream(*data.train) || options.steps > 0,
              "[--steps] the training data is a stream, which has no epochs; "
              "give the number of updates");
  if (!data.test) return;
  TORCH_CHECK(data.test->size() > 0,
              "[Trainer] expected test data with samples, got a size of ",
              data.test->size(), "; leave TrainData::test null instead");
  TORCH_CHECK(!is_stream(*data.test),
              "[Trainer] expected test data with an end, got a stream; read "
              "some of its samples into a dataset");
}

/// Returns the memory of the host that this process may still allocate.
int64_t free_host_bytes() {
  const int64_t free = available_memory();
  const int64_t allowed = process_limits().memory_bytes;
  return allowed > 0 ? std::min(free, allowed - process_memory().rss) : free;
}

}  // namespace

bool is_stream(const Dataset& data) {
  return dynamic_cast<const StreamDataset*>(&data) != nullptr;
}

namespace {

/// Host memory that the options allow a training to take.
int64_t host_limit_of(const TrainOptions& options) {
  if (options.host_memory == "off") return 0;
  if (options.host_memory != "auto") return parse_bytes(options.host_memory);
  // Ranks may share the host.
  return free_host_bytes() / 4 * 3 / std::max<int64_t>(1, options.ranks);
}

/// Returns host memory for activations, and for state if the options allow it.
PlacedOnHost host_memory_of(const TrainOptions& options, torch::Device device) {
  PlacedOnHost host;
  const int64_t limit = host_limit_of(options);
  if (limit <= 0) return host;
  const bool state =
      options.state != StatePlace::kDevice && state_refusal(options).empty();
  if (!device.is_cuda()) {
    if (state) host.state_memory = HostTensorsOnCpu::make(limit);
    return host;
  }
  const auto quota = std::make_shared<HostQuota>(limit);
  host.activations = make_host_store(device.index(), quota);
  if (state) host.state_memory = make_pinned_tensors(device.index(), quota);
  return host;
}

}  // namespace

void apply_settings(Model& model, const TrainOptions& options,
                    torch::Device device) {
  if (device.is_cuda()) {
    // Values that stay in fp32 under autocast need no more than TF32 either.
    const bool tf32 = options.tf32 || options.precision != Precision::kFp32;
    compat::set_cuda_library_options({tf32, options.autotune == Autotune::kOn});
    allow_tf32x3_gemm(options.fp32_products == MatrixProducts::kAuto && !tf32);
    compat::allow_lt_gemm(options.half_products == MatrixProducts::kAuto);
  }
  set_weight_layout(model, options.layout);
}

namespace {

/// Converts the weights of linear layers that no two stages share.
void convert_weights(const Model& model) {
  TORCH_CHECK(model.linear_parameters != nullptr,
              "[--parameters] bf16: the model does not name its linear layers "
              "(Model::linear_parameters)");
  std::set<const c10::TensorImpl*> shared;
  for (const auto& tied : tied_parameters(model.chain)) {
    shared.insert(tied.parameter.unsafeGetTensorImpl());
  }
  const torch::NoGradGuard no_grad;
  for (torch::Tensor& weight : model.linear_parameters()) {
    if (weight.dim() == 2 && weight.scalar_type() == torch::kFloat &&
        !shared.contains(weight.unsafeGetTensorImpl())) {
      weight.set_data(weight.detach().to(torch::kBFloat16));
    }
  }
}

}  // namespace

PlacedOnHost place_model(Model& model, const TrainOptions& options,
                         torch::Device device) {
  PlacedOnHost host = host_memory_of(options, device);
  const bool may_move =
      host.state_memory && parameters_refusal(options).empty();
  bool all = options.state == StatePlace::kHostAll;
  if (!all) {
    const auto failure = out_of_memory_in([&] { model.root->to(device); });
    const bool falls_back = may_move && options.state == StatePlace::kAuto;
    TORCH_CHECK_WITH(OutOfMemoryError, !failure || falls_back, *failure);
    if (failure) model.root->to(torch::kCPU);  // with those that were moved
    all = failure.has_value();
  }
  if (options.parameters == ParameterType::kBf16) convert_weights(model);
  apply_settings(model, options, device);
  if (device.is_cuda() && options.weight_copies != WeightCopiesMode::kOff &&
      model.packed_groups && options.shard != Sharding::kParameters) {
    for (const auto& group : model.packed_groups()) ops::pack_contiguous(group);
  }
  model.root->train();
  if (host.activations) {
    model.chain = with_host_variants(model.chain, host.activations);
  }
  TORCH_CHECK_WITH(OutOfMemoryError, !all || may_move,
                   "[--state] host-all: the host has no free memory");
  if (!may_move) return host;
  host.parameters =
      std::make_shared<HostParameters>(model.chain, device, host.state_memory);
  model.chain = HostParameters::wrapped(model.chain, host.parameters);
  if (!all) return host;
  // Before the others move, so that they need not fit on the device.
  TORCH_CHECK_WITH(OutOfMemoryError, host.parameters->move_to_host(),
                   "[--state] host-all: the host gives no memory for the "
                   "parameters, with a limit of ",
                   format_bytes(host.state_memory->limit_bytes()));
  model.root->to(device);
  return host;
}

TrainSetup assemble_setup(TrainInputs placed, const TrainOptions& options,
                          torch::Device device, PlacedOnHost host) {
  TrainSetup setup{.options = options,
                   .device = device,
                   .host = std::move(host.activations),
                   .state_memory = std::move(host.state_memory),
                   .host_parameters = std::move(host.parameters),
                   .model = std::move(placed.model),
                   .data = std::move(placed.data),
                   .own_optimizer = std::move(placed.optimizer),
                   .own_rate = std::move(placed.learning_rate)};
  setup.parameters = named(setup.model.root->named_parameters());
  setup.parameter_list = values(setup.parameters);
  setup.autocast = autocast_of(options.precision, device);
  for (const auto& data : {setup.data.train, setup.data.test}) {
    if (!data) continue;
    const auto tensors = data->tensors();
    setup.dataset_bytes += storage_bytes(tensors);
    exclude_from_count(tensors);
  }
  return setup;
}

TrainSetup make_setup(TrainInputs inputs, const TrainOptions& options) {
  TORCH_CHECK(inputs.model.root && inputs.data.train,
              "[Trainer] expected a model and training data");
  check_data(inputs.data, options);
  TORCH_CHECK(!inputs.optimizer || options.shard == Sharding::kNone,
              "[--shard] an own optimizer cannot be sharded; use one of ",
              fmt::format("{}", fmt::join(optimizer_names(), ", ")));
  TORCH_CHECK(
      options.optimizer.groups.empty() || options.shard == Sharding::kNone,
      "[--shard] groups of parameters cannot be sharded");
  const torch::Device device = check_device(options);
  if (options.threads > 0) at::set_num_threads(options.threads);
  PlacedOnHost host = place_model(inputs.model, options, device);
  if (device.is_cpu()) {
    // The caller may have made the model before memory was counted.
    include_in_count(inputs.model.root->parameters());
    include_in_count(inputs.model.root->buffers());
  }
  const bool check = inputs.check_model;
  TrainSetup setup =
      assemble_setup(std::move(inputs), options, device, std::move(host));
  if (check) check_model(setup);
  setup.snapshot =
      std::make_shared<WindowSnapshot>(device, setup.model.root->buffers());
  setup.snapshot->remember({}, 0);
  return setup;
}

TrainSetup make_setup(const TrainConfig& config) {
  return make_setup(make_inputs(config), config);
}

StageParameters* moving_parameters(const TrainSetup& setup) {
  if (setup.sharded) return setup.sharded.get();
  const auto& host = setup.host_parameters;
  return host && host->on_host() ? host.get() : nullptr;
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

const NamedTensors& updated_parameters(const TrainSetup& setup) {
  if (setup.sharded) return setup.sharded->trained()->list();
  return setup.parameters;
}

std::unique_ptr<Optimizer> optimizer_of(const TrainSetup& setup) {
  const TrainOptions& config = setup.options;
  const Model& model = setup.model;
  const NamedTensors& parameters = setup.parameters;
  const bool bf16 = config.parameters == ParameterType::kBf16;
  if (setup.own_optimizer) {
    TORCH_CHECK(!bf16,
                "[--parameters] bf16 needs an optimizer of make_optimizer(), "
                "got one of the caller; use --parameters fp32");
    auto own = setup.own_optimizer(parameters);
    TORCH_CHECK(own != nullptr,
                "[Trainer] expected TrainInputs::optimizer to return an "
                "optimizer, got null");
    return own;
  }
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
  auto optimizer = make_optimizer(options, updated_parameters(setup));
  if (bf16) {
    dynamic_cast<PartialOptimizer&>(*optimizer).round_stochastically();
  }
  return optimizer;
}

torch::ScalarType gradient_type(const TrainSetup& setup,
                                const torch::Tensor& parameter) {
  const bool bf16 = setup.options.parameters == ParameterType::kBf16 &&
                    parameter.scalar_type() == torch::kBFloat16;
  return bf16 ? torch::kFloat : parameter.scalar_type();
}

torch::Tensor zero_gradient(const TrainSetup& setup,
                            const torch::Tensor& parameter) {
  return torch::zeros_like(parameter, gradient_type(setup, parameter));
}

int64_t gradient_bytes(const TrainSetup& setup,
                       const torch::Tensor& parameter) {
  if (parameter.device() != setup.device) return 0;
  const auto item =
      static_cast<int64_t>(c10::elementSize(gradient_type(setup, parameter)));
  return allocated_bytes(parameter.numel() * item, setup.device);
}

std::string move_state_to_host(Optimizer& optimizer, const TrainSetup& setup) {
  auto* partial = dynamic_cast<PartialOptimizer*>(&optimizer);
  TORCH_CHECK(partial != nullptr,
              "[--state] host needs an optimizer of make_optimizer(), got one "
              "of the caller; use --state device");
  const std::string refusal = state_refusal(setup.options);
  TORCH_CHECK(refusal.empty(), "[--state] host: ", refusal,
              "; use --state device");
  const auto& host = setup.state_memory;
  if (!host) return "the host has no free memory";
  if (partial->move_state(host, setup.options.host_share)) return "";
  return fmt::format("the host gives no memory for it, with a limit of {}",
                     format_bytes(host->limit_bytes()));
}

std::unique_ptr<Optimizer> measured_optimizer_of(const TrainSetup& setup) {
  auto optimizer = optimizer_of(setup);
  if (!state_on_host(setup.options.state)) return optimizer;
  const std::string failure = move_state_to_host(*optimizer, setup);
  TORCH_CHECK_WITH(OutOfMemoryError, failure.empty(),
                   "[--state] host: ", failure);
  return optimizer;
}

std::string optimizer_name(const TrainSetup& setup) {
  return setup.own_optimizer ? "own" : setup.options.optimizer.name;
}

void prepare_batch(const TrainSetup& setup, Batch& batch) {
  if (std::exchange(batch.prepared, true)) return;
  const torch::NoGradGuard no_grad;
  if (setup.data.prepare) setup.data.prepare(batch);
  if (setup.options.layout != ImageLayout::kChannelsLast) return;
  for (auto& tensor : batch.tensors) {
    if (tensor.defined() && tensor.dim() == 4 && tensor.is_floating_point()) {
      tensor = tensor.contiguous(at::MemoryFormat::ChannelsLast);
    }
  }
}

LoaderOptions make_loader_options(const TrainSetup& setup) {
  LoaderOptions loading;
  loading.seed = setup.options.seed;
  loading.workers = setup.options.workers;
  loading.pin = setup.device.is_cuda();
  if (setup.options.resize == ResizePlace::kWorkers) {
    loading.transform = [&setup](Batch& batch) { prepare_batch(setup, batch); };
  }
  return loading;
}

compat::AutocastState autocast_of(Precision precision, torch::Device device) {
  compat::AutocastState state;
  if (precision == Precision::kFp32) return state;
  // A forward casts each weight only once, and the cache would keep the copies
  // of recomputed stages until the end of the forward.
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

torch::ScalarType type_of(Precision precision) {
  return precision == Precision::kFp32   ? torch::kFloat
         : precision == Precision::kBf16 ? torch::kBFloat16
                                         : torch::kHalf;
}

std::vector<torch::Tensor> weights_read_in_half(const Model& model) {
  std::vector<torch::Tensor> weights;
  if (model.linear_parameters) weights = model.linear_parameters();
  std::map<const void*, int> owners;
  for (const auto& module : model.root->modules()) {
    for (const auto& parameter : module->parameters(/*recurse=*/false)) {
      ++owners[parameter.unsafeGetTensorImpl()];
    }
    const bool converts = module->as<torch::nn::LinearImpl>() != nullptr ||
                          module->as<torch::nn::Conv1dImpl>() != nullptr ||
                          module->as<torch::nn::Conv2dImpl>() != nullptr ||
                          module->as<torch::nn::Conv3dImpl>() != nullptr;
    if (!converts) continue;
    for (const auto& parameter : module->parameters(/*recurse=*/false)) {
      weights.push_back(parameter);
    }
  }
  std::set<const void*> also_read_otherwise;
  for (const auto& tied : tied_parameters(model.chain)) {
    also_read_otherwise.insert(tied.parameter.unsafeGetTensorImpl());
  }
  if (model.embeddings) {
    for (const auto& table : model.embeddings()) {
      also_read_otherwise.insert(table.unsafeGetTensorImpl());
    }
  }
  std::erase_if(weights, [&](const torch::Tensor& weight) {
    const void* key = weight.unsafeGetTensorImpl();
    return also_read_otherwise.count(key) > 0 || owners[key] > 1;
  });
  return weights;
}

std::unique_ptr<WeightCopies> weight_copies_of(const TrainSetup& setup,
                                               Precision precision) {
  const Model& model = setup.model;
  const WeightCopiesMode mode = setup.options.weight_copies;
  const bool moved = moving_parameters(setup) != nullptr;
  const bool bf16 = setup.options.parameters == ParameterType::kBf16;
  const bool wanted = mode == WeightCopiesMode::kAuto
                          ? setup.device.is_cuda() || bf16
                          : mode != WeightCopiesMode::kOff;
  if (!wanted || !model.linear_parameters) return nullptr;
  const torch::ScalarType type = type_of(precision);
  WeightCopiesOptions options;
  options.convert_per_use = moved || mode == WeightCopiesMode::kEach;
  options.split = !moved && mode == WeightCopiesMode::kSplit;
  options.half_weights = bf16;
  for (const auto& tied : tied_parameters(model.chain)) {
    options.shared_weights.push_back(tied.parameter);
  }
  if (model.embeddings) options.embedding_tables = model.embeddings();
  return std::make_unique<WeightCopies>(model.linear_parameters(), type,
                                        options);
}

Schedule schedule_of(const TrainSetup& setup) {
  const TrainOptions& options = setup.options;
  const int stages = setup.model.chain.size();
  if (options.plans_schedule() || options.plans_if_long()) {
    return make_schedule("none", stages);
  }
  if (is_schedule_text(options.recompute)) {
    return make_schedule(options.recompute, stages);
  }
  const Strategy strategy = Strategy::parse(options.recompute);
  if (strategy.kind != StrategyKind::kCheckpoints) {
    return make_schedule(strategy, stages);
  }
  // Use two samples, because BatchNorm cannot train on one.
  Batch batch = largest_batch(*setup.data.train, 2);
  move_to(batch, setup.device);
  prepare_batch(setup, batch);
  const compat::AutocastGuard autocast(setup.autocast);
  return make_schedule(strategy, stages,
                       output_bytes(setup.model.chain, batch.tensors));
}

LrScheduleOptions lr_schedule_of(const TrainOptions& config) {
  LrScheduleOptions rate = config.rate;
  rate.base = scale_rate(
      rate.base, config.scale_lr, static_cast<double>(config.global_batch),
      static_cast<double>(std::max<int64_t>(config.base_batch, 1)));
  return rate;
}

double learning_rate(const TrainSetup& setup, const LrScheduleOptions& schedule,
                     int64_t step) {
  if (!setup.own_rate) return rate_at(schedule, step);
  const double rate = setup.own_rate(step);
  TORCH_CHECK(std::isfinite(rate) && rate >= 0,
              "[Trainer] expected TrainInputs::learning_rate to return 0 or "
              "more, got ",
              rate, " for update ", step);
  return rate;
}

GradScaler::Options scaler_of(const TrainOptions& config) {
  GradScaler::Options options;
  options.enabled = config.precision == Precision::kFp16;
  options.scale = config.loss_scale;
  return options;
}

}  // namespace reprise::detail
