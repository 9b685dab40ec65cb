// Two optimizers that Reprise does not have, in its trainer:
//
//   1. Lion, a class derived from reprise::Optimizer, with its state saved in the run.
//   2. torch::optim::RMSprop, through wrap_optimizer().
//
// Checks Lion against the formula, written as plain code, and that both continue a run that
// was stopped half-way with the same bits.
#include <reprise/train.h>

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

namespace {

using reprise::NamedTensors;
using torch::Tensor;

constexpr int64_t kSamples = 64;
constexpr int64_t kBatch = 16;
constexpr int64_t kWidth = 32;
constexpr double kRate = 3e-3;
constexpr double kBeta1 = 0.9, kBeta2 = 0.99, kDecay = 0.01;

/// Lion (Chen et al. 2023): steps by the sign of an interpolated momentum.
class Lion final : public reprise::Optimizer {
 public:
  explicit Lion(const NamedTensors& parameters) : parameters_(parameters) {}

  void step(double lr) override {
    const torch::NoGradGuard no_grad;
    allocate();
    for (auto& [name, parameter] : parameters_) {
      const Tensor gradient = parameter.grad();
      if (!gradient.defined()) continue;
      Tensor momentum = momenta_.at(name);
      const Tensor direction =
          (momentum * kBeta1 + gradient * (1 - kBeta1)).sign_();
      parameter.mul_(1 - lr * kDecay).sub_(direction, lr);
      momentum.mul_(kBeta2).add_(gradient, 1 - kBeta2);
    }
  }
  NamedTensors state() const override {
    NamedTensors list;
    for (const auto& [name, momentum] : momenta_) {
      list.emplace_back("momentum." + name, momentum);
    }
    return list;
  }
  std::vector<Tensor> held() const override {
    std::vector<Tensor> list;
    for (const auto& item : momenta_) list.push_back(item.second);
    return list;
  }
  void load(const NamedTensors& state) override {
    const torch::NoGradGuard no_grad;
    allocate();
    TORCH_CHECK(state.size() == momenta_.size(),
                "[Lion] expected the momenta of ", momenta_.size(),
                " parameters, got ", state.size());
    const std::string prefix = "momentum.";
    for (const auto& [name, saved] : state) {
      momenta_.at(name.substr(prefix.size())).copy_(saved);
    }
  }

 private:
  /// Allocates before the first write, so that a lack of memory changes nothing.
  void allocate() {
    for (const auto& [name, parameter] : parameters_) {
      if (!momenta_.contains(name)) {
        momenta_[name] = torch::zeros_like(parameter);
      }
    }
  }

  NamedTensors parameters_;
  std::map<std::string, Tensor> momenta_;
};

using MakeOptimizer =
    std::function<std::unique_ptr<reprise::Optimizer>(const NamedTensors&)>;

std::unique_ptr<reprise::Optimizer> make_lion(const NamedTensors& parameters) {
  return std::make_unique<Lion>(parameters);
}

std::unique_ptr<reprise::Optimizer> make_rmsprop(
    const NamedTensors& parameters) {
  std::vector<Tensor> list;
  for (const auto& item : parameters) list.push_back(item.second);
  return reprise::wrap_optimizer(std::make_unique<torch::optim::RMSprop>(
                                     list, torch::optim::RMSpropOptions(kRate)),
                                 parameters);
}

/// Points of a plane and which of two spirals they belong to.
class Points final : public reprise::Dataset {
 public:
  Points() {
    const Tensor t = torch::linspace(0.5, 4, kSamples);
    y_ = torch::arange(kSamples) % 2;
    const Tensor angle = t * 2 + y_ * 3.14159;
    x_ = torch::stack({t * torch::cos(angle), t * torch::sin(angle)}, 1);
  }
  int64_t size() const override { return kSamples; }
  reprise::Batch get(const std::vector<int64_t>& indices) const override {
    const Tensor rows = torch::tensor(indices);
    const auto n = static_cast<int64_t>(indices.size());
    return {.tensors = {x_.index_select(0, rows), y_.index_select(0, rows)},
            .samples = n,
            .count = n};
  }
  std::string description() const override { return "two spirals"; }

 private:
  Tensor x_, y_;
};

Tensor loss_sum(const Tensor& scores, const Tensor& y) {
  namespace F = torch::nn::functional;
  return F::cross_entropy(scores, y,
                          F::CrossEntropyFuncOptions().reduction(torch::kSum));
}

torch::nn::Sequential make_net() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(2, kWidth), torch::nn::Tanh(),
                               torch::nn::Linear(kWidth, kWidth),
                               torch::nn::Tanh(), torch::nn::Linear(kWidth, 2));
}

reprise::TrainInputs make_inputs(const torch::nn::Sequential& net,
                                 const MakeOptimizer& optimizer) {
  std::vector<reprise::Stage> stages;
  const reprise::Chain layers(net);
  for (int i = 0; i < layers.size(); ++i) {
    stages.push_back(layers[i].on_first());
  }
  stages.push_back(reprise::make_stage("loss", loss_sum));
  return {.model = {.name = "spirals",
                    .root = net.ptr(),
                    .chain = reprise::Chain(stages)},
          .data = {.name = "spirals", .train = std::make_shared<Points>()},
          .optimizer = optimizer};
}

reprise::TrainOptions make_options(int64_t steps) {
  reprise::TrainOptions options;
  options.batch = options.global_batch = kBatch;
  options.rate.base = kRate;
  options.steps = steps;
  options.recompute = "sqrt";
  options.workers = 1;
  return options;
}

/// Trains `steps` updates, in two parts if `stop` is positive.
torch::nn::Sequential train(const MakeOptimizer& optimizer, int64_t steps,
                            int64_t stop, const std::string& directory) {
  torch::nn::Sequential net = make_net();
  const auto run_to = [&](int64_t last, const reprise::RunOptions& run) {
    reprise::run_training(
        make_options(last),
        [&](const reprise::TrainOptions&) {
          net = make_net();  // a resumed run loads its weights
          return make_inputs(net, optimizer);
        },
        run);
  };
  if (stop == 0) {
    run_to(steps, {});
    return net;
  }
  run_to(stop, {.out = directory});
  run_to(steps,
         {.resume = directory, .changes = {{"steps", std::to_string(steps)}}});
  return net;
}

/// Lion as a plain loop over the same batches.
torch::nn::Sequential train_lion_plainly(int64_t steps) {
  torch::nn::Sequential net = make_net();
  reprise::LoaderOptions loading;
  loading.batch = kBatch;
  loading.seed = reprise::TrainOptions().seed;
  reprise::Loader loader(std::make_shared<Points>(), loading);
  std::vector<Tensor> momenta;
  for (const auto& p : net->parameters())
    momenta.push_back(torch::zeros_like(p));
  for (int64_t done = 0; done < steps;) {
    const auto batch = loader.next();
    if (!batch) continue;  // the end of an epoch
    const Tensor loss =
        loss_sum(net->forward(batch->tensors[0]), batch->tensors[1]);
    loss.backward(
        torch::full_like(loss, 1.0 / static_cast<double>(batch->count)));
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < momenta.size(); ++i) {
      Tensor p = net->parameters()[i];
      const Tensor g = p.grad();
      const Tensor c = momenta[i] * kBeta1 + g * (1 - kBeta1);
      p.mul_(1 - kRate * kDecay).sub_(torch::sign(c), kRate);
      momenta[i] = momenta[i] * kBeta2 + g * (1 - kBeta2);
      p.mutable_grad().reset();
    }
    ++done;
  }
  return net;
}

double largest_difference(const torch::nn::Sequential& a,
                          const torch::nn::Sequential& b) {
  double most = 0;
  for (size_t i = 0; i < a->parameters().size(); ++i) {
    most = std::max(
        most,
        (a->parameters()[i] - b->parameters()[i]).abs().max().item<double>());
  }
  return most;
}

double loss_of(torch::nn::Sequential& net) {
  const torch::NoGradGuard no_grad;
  std::vector<int64_t> all(kSamples);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
  const auto batch = Points().get(all);
  return loss_sum(net->forward(batch.tensors[0]), batch.tensors[1])
             .item<double>() /
         kSamples;
}

void remove_directory(const std::string& path) {
  std::vector<std::filesystem::path> list;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(path)) {
    list.push_back(entry.path());
  }
  for (auto file = list.rbegin(); file != list.rend(); ++file) {
    std::filesystem::remove(*file);
  }
  std::filesystem::remove(path);
}

}  // namespace

int main() {
  constexpr int64_t kSteps = 40;
  const std::string base = std::filesystem::temp_directory_path() /
                           ("own_optimizer." + std::to_string(getpid()));
  bool good = true;
  for (const auto& [name, make] :
       std::vector<std::pair<std::string, MakeOptimizer>>{
           {"Lion", make_lion}, {"RMSprop", make_rmsprop}}) {
    auto before = make_net();
    auto whole = train(make, kSteps, 0, "");
    auto parts = train(make, kSteps, kSteps / 2, base + name);
    remove_directory(base + name);
    const bool resumed = largest_difference(whole, parts) == 0;
    const bool learned = loss_of(whole) < loss_of(before);
    std::cout << name << ": loss " << loss_of(before) << " to "
              << loss_of(whole)
              << "; resumed run equal: " << (resumed ? "yes" : "no") << '\n';
    good = good && resumed && learned;
  }
  const double difference = largest_difference(train(make_lion, kSteps, 0, ""),
                                               train_lion_plainly(kSteps));
  std::cout << "Lion differs from plain code by " << difference << '\n';
  return good && difference < 1e-6 ? 0 : 1;
}
