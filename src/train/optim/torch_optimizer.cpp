// Optimizers of LibTorch as an Optimizer. Tested by
// tests/train/optim/torch_optimizer_test.cpp.
#include <reprise/memory/meter.h>
#include <reprise/train/optimizer.h>

#include <c10/util/Exception.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <cstring>
#include <set>
#include <sstream>
#include <utility>

namespace reprise {
namespace {

namespace optim = torch::optim;
using State = optim::OptimizerParamState;

constexpr const char* kArchive = "archive";

class TorchOptimizer final : public Optimizer {
 public:
  TorchOptimizer(std::unique_ptr<optim::Optimizer> optimizer,
                 const NamedTensors& parameters)
      : optimizer_(std::move(optimizer)) {
    TORCH_CHECK(optimizer_ != nullptr,
                "[wrap_optimizer] expected an optimizer, got null");
    std::set<const c10::TensorImpl*> known;
    for (const auto& [name, parameter] : parameters) {
      known.insert(parameter.unsafeGetTensorImpl());
    }
    for (const auto& group : optimizer_->param_groups()) {
      for (const torch::Tensor& parameter : group.params()) {
        TORCH_CHECK(known.contains(parameter.unsafeGetTensorImpl()),
                    "[wrap_optimizer] expected parameters of the model, got "
                    "another one of shape ",
                    parameter.sizes(),
                    "; make the optimizer of the parameters that are passed to "
                    "TrainInputs::optimizer");
        if (!device_) device_ = parameter.device();
      }
    }
    TORCH_CHECK(device_,
                "[wrap_optimizer] expected an optimizer with parameters, got "
                "one without any");
    auto& groups = optimizer_->param_groups();
    const double first = groups.front().options().get_lr();
    TORCH_CHECK(first != 0,
                "[wrap_optimizer] expected a first learning rate other than 0, "
                "to which those of the other groups are relative");
    for (auto& group : groups) {
      lr_factors_.push_back(group.options().get_lr() / first);
    }
  }

  void step(double lr) override {
    auto& groups = optimizer_->param_groups();
    for (size_t i = 0; i < lr_factors_.size(); ++i) {
      groups[i].options().set_lr(lr * lr_factors_[i]);
    }
    try {
      optimizer_->step();
    } catch (const c10::Error& error) {
      TORCH_CHECK(
          !is_out_of_memory(error),
          "[optimizer] memory ran out within a step of torch::optim, "
          "which may have updated some parameters: ",
          error.what_without_backtrace(),
          "; continue from the last saved state with a smaller --batch");
      throw;
    }
  }

  NamedTensors state() const override {
    torch::serialize::OutputArchive archive;
    optimizer_->save(archive);
    std::ostringstream out;
    archive.save_to(out);
    const std::string bytes = out.str();
    const auto tensor =
        torch::empty({static_cast<int64_t>(bytes.size())}, torch::kByte);
    std::memcpy(tensor.data_ptr(), bytes.data(), bytes.size());
    return {{kArchive, tensor}};
  }

  std::vector<torch::Tensor> held() const override {
    std::vector<torch::Tensor> list;
    for (const auto& item : optimizer_->state()) {
      const State& state = *item.second;
      add_known(state, list);
    }
    return list;
  }

  void load(const NamedTensors& state) override {
    TORCH_CHECK(
        state.size() == 1 && state[0].first == kArchive &&
            state[0].second.scalar_type() == torch::kByte,
        "[optimizer] expected the state of an optimizer of torch::optim, "
        "got that of another optimizer");
    const torch::Tensor bytes = state[0].second.cpu().contiguous();
    std::istringstream in(std::string(
        static_cast<const char*>(bytes.data_ptr()), bytes.nbytes()));
    torch::serialize::InputArchive archive;
    archive.load_from(in, *device_);
    optimizer_->load(archive);
  }

 private:
  static void add_known(const State& state, std::vector<torch::Tensor>& list) {
    const auto keep = [&list](const torch::Tensor& tensor) {
      if (tensor.defined()) list.push_back(tensor);
    };
    if (const auto* adam = dynamic_cast<const optim::AdamParamState*>(&state)) {
      keep(adam->exp_avg());
      keep(adam->exp_avg_sq());
      keep(adam->max_exp_avg_sq());
    } else if (const auto* adamw =
                   dynamic_cast<const optim::AdamWParamState*>(&state)) {
      keep(adamw->exp_avg());
      keep(adamw->exp_avg_sq());
      keep(adamw->max_exp_avg_sq());
    } else if (const auto* sgd =
                   dynamic_cast<const optim::SGDParamState*>(&state)) {
      keep(sgd->momentum_buffer());
    } else if (const auto* rms =
                   dynamic_cast<const optim::RMSpropParamState*>(&state)) {
      keep(rms->square_avg());
      keep(rms->momentum_buffer());
      keep(rms->grad_avg());
    } else if (const auto* grad =
                   dynamic_cast<const optim::AdagradParamState*>(&state)) {
      keep(grad->sum());
    }
  }

  std::unique_ptr<optim::Optimizer> optimizer_;
  std::vector<double> lr_factors_;  // by group, relative to the first
  std::optional<torch::Device> device_;
};

}  // namespace

std::unique_ptr<Optimizer> wrap_optimizer(
    std::unique_ptr<torch::optim::Optimizer> optimizer,
    const NamedTensors& parameters) {
  return std::make_unique<TorchOptimizer>(std::move(optimizer), parameters);
}

}  // namespace reprise
