#include "train/step/micro_step.h"
#include "train/step/model_checks.h"
#include "train/step/step_runner.h"
#include "train/step/train_setup.h"
#include "train/step/window_exchange.h"

#include <reprise/accumulate/accumulator.h>
#include <reprise/recompute/check_chain.h>
#include <reprise/train/own_loop.h>

#include <ATen/Context.h>
#include <torch/utils.h>

#include <utility>

namespace reprise {
namespace {

using detail::TrainSetup;

torch::Device device_of(const Model& model, const char* call) {
  TORCH_CHECK(model.root, "[", call,
              "] expected a model with a root, got none");
  const auto parameters = model.root->parameters();
  TORCH_CHECK(!parameters.empty(), "[", call,
              "] expected a model with parameters, got none");
  for (const auto& parameter : parameters) {
    TORCH_CHECK(parameter.device() == parameters[0].device(), "[", call,
                "] expected all parameters on one device, got ",
                parameters[0].device(), " and ", parameter.device());
  }
  return parameters[0].device();
}

/// Options of a training that runs micro-batches as a loop of the caller does:
/// no loader, no CUDA graphs, the layout of the model's weights and the library settings of
/// the process.
TrainOptions loop_options(const Model& model, torch::Device device) {
  TrainOptions options;
  options.layout = ImageLayout::kPlanes;
  options.autotune = Autotune::kOff;
  for (const auto& parameter : model.root->parameters()) {
    if (parameter.dim() == 4 && !parameter.is_contiguous() &&
        parameter.is_contiguous(at::MemoryFormat::ChannelsLast)) {
      options.layout = ImageLayout::kChannelsLast;
    }
  }
  options.device = device.str();
  options.workers = 0;
  options.graph = GraphMode::kOff;
  options.update = UpdateMode::kAfter;  // by the caller
  options.state = StatePlace::kDevice;
  options.evaluate = false;
  options.batch = options.accumulate = options.global_batch = 1;
  options.recompute = "none";
  if (device.is_cuda()) {
    options.tf32 = at::globalContext().allowTF32CuBLAS();
    if (at::globalContext().benchmarkCuDNN()) {
      options.autotune = Autotune::kOn;
    }
  }
  return options;
}

/// Restores settings of CUDA libraries, which belong to the caller's program.
class LibrarySettings {
 public:
  explicit LibrarySettings(torch::Device device) : cuda_(device.is_cuda()) {
    if (!cuda_) return;
    cublas_tf32_ = at::globalContext().allowTF32CuBLAS();
    cudnn_tf32_ = at::globalContext().allowTF32CuDNN();
    benchmark_ = at::globalContext().benchmarkCuDNN();
  }
  ~LibrarySettings() {
    if (!cuda_) return;
    at::globalContext().setAllowTF32CuBLAS(cublas_tf32_);
    at::globalContext().setAllowTF32CuDNN(cudnn_tf32_);
    at::globalContext().setBenchmarkCuDNN(benchmark_);
  }
  LibrarySettings(const LibrarySettings&) = delete;
  LibrarySettings& operator=(const LibrarySettings&) = delete;

 private:
  bool cuda_;
  bool cublas_tf32_ = false, cudnn_tf32_ = false, benchmark_ = false;
};

/// Stands for an optimizer without state.
class NoOptimizer final : public Optimizer {
 public:
  void step(double) override {}
  NamedTensors state() const override { return {}; }
  std::vector<torch::Tensor> held() const override { return {}; }
  void load(const NamedTensors&) override {}
};

int64_t samples_of(const Tensors& tensors, const char* call) {
  int64_t samples = -1;
  for (const auto& tensor : tensors) {
    if (!tensor.defined()) continue;
    TORCH_CHECK(tensor.dim() > 0 && tensor.size(0) > 0, "[", call,
                "] expected tensors whose first dimension counts the samples, "
                "got one of shape ",
                tensor.sizes());
    if (samples < 0) samples = tensor.size(0);
    TORCH_CHECK(tensor.size(0) == samples, "[", call,
                "] expected tensors with the same number of samples, got ",
                samples, " and ", tensor.size(0));
  }
  TORCH_CHECK(samples > 0, "[", call, "] expected a batch with tensors, got ",
              tensors.size(), " undefined ones");
  return samples;
}

/// Repeats the samples of one batch.
class SampleDataset final : public Dataset {
 public:
  explicit SampleDataset(Batch batch)
      : batch_(std::move(batch)),
        samples_(samples_of(batch_.tensors, "plan_model")) {}
  int64_t size() const override { return samples_; }
  Batch get(const std::vector<int64_t>& indices) const override {
    const torch::NoGradGuard no_grad;
    Batch batch{.tensors = {},
                .samples = static_cast<int64_t>(indices.size()),
                .count = static_cast<int64_t>(indices.size())};
    const torch::Tensor list = torch::tensor(indices);
    for (const auto& tensor : batch_.tensors) {
      batch.tensors.push_back(
          tensor.defined() ? tensor.index_select(0, list.to(tensor.device()))
                           : tensor);
    }
    return batch;
  }
  std::string description() const override { return "a sample batch"; }

 private:
  Batch batch_;
  int64_t samples_;
};

/// Batches that a function of the caller makes.
class MadeDataset final : public Dataset {
 public:
  explicit MadeDataset(std::function<Batch(int64_t)> make)
      : make_(std::move(make)) {
    TORCH_CHECK(make_, "[plan_model] expected a function, got none");
  }
  // A batch of more samples than this is not read by a loader.
  int64_t size() const override { return 1; }
  Batch get(const std::vector<int64_t>& indices) const override {
    Batch batch = make_(static_cast<int64_t>(indices.size()));
    batch.samples = static_cast<int64_t>(indices.size());
    return batch;
  }
  std::string description() const override { return "made batches"; }

 private:
  std::function<Batch(int64_t)> make_;
};

PlanResult plan_with(const Model& model, std::shared_ptr<const Dataset> data,
                     const PlanRequest& request,
                     const ModelPlanOptions& options, torch::Device device) {
  const TrainOptions training = loop_options(model, device);
  TrainInputs inputs{
      model, {.name = "own loop", .train = std::move(data)}, options.optimizer};
  inputs.check_model = false;  // the callers have done so
  if (!inputs.optimizer) {
    inputs.optimizer = [](const NamedTensors&) {
      return std::make_unique<NoOptimizer>();
    };
  }
  PlanningOptions planning = options.planning;
  if (planning.memory == 0) planning.memory = request.memory;
  const auto planner = [&] {
    const LibrarySettings restore(device);
    return TrainingPlanner(std::move(inputs), training, planning);
  };
  return planner().plan(request);
}

}  // namespace

PlanResult plan_model(const Model& model, const Batch& sample,
                      const PlanRequest& request,
                      const ModelPlanOptions& options) {
  const torch::Device device = device_of(model, "plan_model");
  auto data = std::make_shared<SampleDataset>(sample);
  Batch batch = sample;
  move_to(batch, device);
  model.root->train();
  check_chain(model.chain, batch.tensors);
  if (options.check_loss) check_loss(model.chain, batch.tensors);
  return plan_with(model, std::move(data), request, options, device);
}

PlanResult plan_model(const Model& model,
                      const std::function<Batch(int64_t samples)>& make,
                      const PlanRequest& request,
                      const ModelPlanOptions& options) {
  const torch::Device device = device_of(model, "plan_model");
  auto data = std::make_shared<MadeDataset>(make);
  model.root->train();
  Batch batch = data->get({0, 0});  // BatchNorm cannot train on one sample
  move_to(batch, device);
  check_chain(model.chain, batch.tensors);
  return plan_with(model, std::move(data), request, options, device);
}

std::vector<Tensors> split(const Tensors& batch, int64_t micro_batch) {
  TORCH_CHECK(micro_batch > 0, "[split] expected a positive micro-batch, got ",
              micro_batch);
  const int64_t samples = samples_of(batch, "split");
  std::vector<Tensors> list;
  for (int64_t first = 0; first < samples; first += micro_batch) {
    const int64_t count = std::min(micro_batch, samples - first);
    Tensors& micro = list.emplace_back();
    for (const auto& tensor : batch) {
      micro.push_back(tensor.defined() ? tensor.narrow(0, first, count)
                                       : tensor);
    }
  }
  return list;
}

struct PlannedStep::Impl {
  Impl(const Model& model, Plan planned)
      : plan(std::move(planned)),
        setup(make_setup_of(model, plan)),
        ranks(detail::make_ranks(nullptr)),
        exchange(detail::make_window_exchange(*ranks, setup)),
        runner(setup, *exchange, plan.schedule, {.graph = GraphMode::kOff}),
        accumulator(trained(setup)) {}

  static TrainSetup make_setup_of(Model model, const Plan& plan) {
    const torch::Device device = device_of(model, "PlannedStep");
    TrainOptions training = loop_options(model, device);
    training.precision = plan.precision;
    training.weight_copies =
        plan.weight_copies.value_or(training.weight_copies);
    const LibrarySettings restore(device);
    auto host = detail::place_model(model, training, device);
    return detail::assemble_setup({std::move(model), {}, {}}, training, device,
                                  std::move(host));
  }

  static std::vector<torch::Tensor> trained(const TrainSetup& setup) {
    std::vector<torch::Tensor> list = setup.parameter_list;
    std::erase_if(list, [](const auto& p) { return !p.requires_grad(); });
    return list;
  }

  Plan plan;
  TrainSetup setup;
  std::unique_ptr<detail::Ranks> ranks;
  std::unique_ptr<detail::WindowExchange> exchange;
  detail::StepRunner runner;
  Accumulator accumulator;
  double scale = 1;
};

PlannedStep::PlannedStep(const Model& model, const Plan& plan)
    : impl_(std::make_unique<Impl>(model, plan)) {
  TORCH_CHECK(plan.update == UpdateMode::kAfter,
              "[PlannedStep] expected a plan with the update after the "
              "backward, got one with updates in it, which only a Trainer "
              "makes; plan with TrainOptions::update = UpdateMode::kAfter");
  TORCH_CHECK(plan.state == StatePlace::kDevice,
              "[PlannedStep] expected a plan with the optimizer's state on the "
              "device, got one with host memory, which only a Trainer uses; "
              "plan with TrainOptions::state = StatePlace::kDevice");
}
PlannedStep::~PlannedStep() = default;
PlannedStep::PlannedStep(PlannedStep&&) noexcept = default;
PlannedStep& PlannedStep::operator=(PlannedStep&&) noexcept = default;

const Plan& PlannedStep::plan() const {
  return impl_->plan;
}

void PlannedStep::begin(double total_count, double loss_scale) {
  detail::check_owned(impl_->setup.model, "PlannedStep");
  impl_->accumulator.begin(total_count);
  impl_->scale = loss_scale;
  impl_->runner.micro_step().clear_loss();
  impl_->runner.refresh_weight_copies();
}

void PlannedStep::add(const Tensors& micro_batch, double count) {
  const double weight = impl_->accumulator.weigh(count) * impl_->scale;
  impl_->runner.run({.tensors = micro_batch, .prepared = true},
                    {.weight = weight});
}

torch::Tensor PlannedStep::clip(double max_norm) {
  return impl_->accumulator.clip(max_norm);
}

double PlannedStep::update(const std::function<void()>& step) {
  const double total = impl_->accumulator.total_count();
  impl_->accumulator.update([&] {
    impl_->runner.expire_weight_copies();
    step();
  });
  return impl_->runner.loss().item<double>() / total;
}

double PlannedStep::update(torch::optim::Optimizer& optimizer) {
  return update([&] { optimizer.step(); });
}

void PlannedStep::abandon() {
  impl_->accumulator.abandon();
  impl_->runner.expire_weight_copies();
}

VerifyReport verify(const Model& model, const Batch& sample,
                    const Strategy& strategy, const VerifyOptions& options) {
  VerifyReport report = verify(model.chain, sample.tensors, strategy, options);
  report.subject = model.name;
  return report;
}

std::vector<VerifyReport> verify(const Model& model, const Batch& sample,
                                 const VerifyOptions& options) {
  auto reports = verify(model.chain, sample.tensors, options);
  for (VerifyReport& report : reports) report.subject = model.name;
  return reports;
}

}  // namespace reprise
