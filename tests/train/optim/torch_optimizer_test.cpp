#include "support.h"
#include "train/optim/random_gradients.h"

#include <reprise/train/optimizer.h>

#include <torch/optim/adam.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

namespace reprise {
namespace {

using testing::error_of;
using testing::on_device;
using testing::same;
using testing::set_random_gradients;

std::vector<torch::Tensor> tensors_of(const NamedTensors& named) {
  std::vector<torch::Tensor> list;
  for (const auto& item : named) list.push_back(item.second);
  return list;
}

NamedTensors parameters_of() {
  torch::manual_seed(1);
  return {{"a", torch::randn({4, 3}, on_device()).requires_grad_()},
          {"b", torch::randn({5}, on_device()).requires_grad_()}};
}

using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(
    std::vector<torch::Tensor>)>;

std::map<std::string, Make> kinds() {
  using namespace torch::optim;
  return {{"adam",
           [](std::vector<torch::Tensor> p) {
             return std::make_unique<Adam>(std::move(p), AdamOptions(0.02));
           }},
          {"sgd",
           [](std::vector<torch::Tensor> p) {
             return std::make_unique<SGD>(std::move(p),
                                          SGDOptions(0.02).momentum(0.9));
           }},
          {"rmsprop", [](std::vector<torch::Tensor> p) {
             return std::make_unique<RMSprop>(std::move(p),
                                              RMSpropOptions(0.02));
           }}};
}

/// The truth: the optimizer itself, in a plain loop.
TEST(TorchOptimizer, UpdatesAsTheOptimizerItself) {
  for (const auto& [name, make] : kinds()) {
    NamedTensors wrapped = parameters_of();
    NamedTensors plain = parameters_of();
    const auto optimizer = wrap_optimizer(make(tensors_of(wrapped)), wrapped);
    const auto itself = make(tensors_of(plain));
    for (int step = 0; step < 3; ++step) {
      set_random_gradients(wrapped, step);
      set_random_gradients(plain, step);
      optimizer->step(0.02);
      itself->step();
    }
    for (size_t i = 0; i < plain.size(); ++i) {
      EXPECT_TRUE(same(wrapped[i].second, plain[i].second)) << name;
    }
    const size_t each = name == "adam" ? 2 : 1;
    EXPECT_EQ(optimizer->held().size(), each * plain.size()) << name;
  }
}

TEST(TorchOptimizer, ContinuesFromItsState) {
  for (const auto& [name, make] : kinds()) {
    NamedTensors whole = parameters_of();
    NamedTensors parts = parameters_of();
    const auto optimizer = wrap_optimizer(make(tensors_of(whole)), whole);
    auto continued = wrap_optimizer(make(tensors_of(parts)), parts);
    for (int step = 0; step < 4; ++step) {
      if (step == 2) {
        const NamedTensors state = continued->state();
        continued = wrap_optimizer(make(tensors_of(parts)), parts);
        continued->load(state);
      }
      set_random_gradients(whole, step);
      set_random_gradients(parts, step);
      optimizer->step(0.01 * step);
      continued->step(0.01 * step);
    }
    for (size_t i = 0; i < whole.size(); ++i) {
      EXPECT_TRUE(same(whole[i].second, parts[i].second)) << name;
    }
  }
}

TEST(TorchOptimizer, ScalesTheRatesOfGroups) {
  NamedTensors parameters = parameters_of();
  const auto before = parameters[1].second.detach().clone();
  using namespace torch::optim;
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<torch::Tensor>{parameters[0].second},
                      std::make_unique<SGDOptions>(0.1));
  groups.emplace_back(std::vector<torch::Tensor>{parameters[1].second},
                      std::make_unique<SGDOptions>(0.4));
  const auto optimizer = wrap_optimizer(
      std::make_unique<SGD>(std::move(groups), SGDOptions(0.1)), parameters);
  set_random_gradients(parameters, 1);
  optimizer->step(0.2);  // twice the first rate, so the second is 0.8
  const torch::NoGradGuard no_grad;
  EXPECT_LT(testing::relative_error(before - 0.8 * parameters[1].second.grad(),
                                    parameters[1].second),
            1e-6);
}

TEST(TorchOptimizer, RejectsWhatItCannotWrap) {
  const NamedTensors parameters = parameters_of();
  const Make adam = kinds().at("adam");
  EXPECT_NE(error_of([&] {
              wrap_optimizer(nullptr, parameters);
            }).find("expected an optimizer, got null"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              wrap_optimizer(adam({torch::zeros({2}).requires_grad_()}),
                             parameters);
            }).find("expected parameters of the model"),
            std::string::npos);
  const auto optimizer =
      wrap_optimizer(adam(tensors_of(parameters)), parameters);
  EXPECT_NE(error_of([&] {
              optimizer->load({{"exp_avg.a", torch::zeros({4, 3})}});
            }).find("that of another optimizer"),
            std::string::npos);
}

}  // namespace
}  // namespace reprise
