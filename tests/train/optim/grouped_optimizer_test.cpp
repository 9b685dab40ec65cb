#include "support.h"
#include "train/optim/random_gradients.h"

#include <reprise/train/optimizer.h>

#include <map>

namespace reprise {
namespace {

using testing::error_of;
using testing::on_device;
using testing::same;
using testing::set_random_gradients;

NamedTensors parameters_of(int seed) {
  torch::manual_seed(seed);
  NamedTensors list;
  for (const char* name : {"body.weight", "body.bias", "norm.weight", "head"}) {
    const bool matrix = std::string(name) == "body.weight";
    list.emplace_back(name, matrix ? torch::randn({5, 7}, on_device())
                                   : torch::randn({6}, on_device()));
    list.back().second.requires_grad_();
  }
  return list;
}

OptimizerOptions with_groups() {
  OptimizerOptions options;
  options.weight_decay = 0.1;
  options.groups.push_back(
      {.contains = [](const std::string&,
                      const torch::Tensor& p) { return p.dim() < 2; },
       .lr_factor = 1,
       .weight_decay = 0});
  options.groups.insert(
      options.groups.begin(),
      {.contains = [](const std::string& name,
                      const torch::Tensor&) { return name == "head"; },
       .lr_factor = 10,
       .weight_decay = {}});
  return options;
}

/// The truth: one optimizer for each parameter, with the settings of its group.
TEST(GroupedOptimizer, UpdatesEachGroupWithItsSettings) {
  for (const char* name : {"sgd", "adamw", "adafactor"}) {
    NamedTensors grouped = parameters_of(1);
    NamedTensors single = parameters_of(1);
    OptimizerOptions options = with_groups();
    options.name = name;
    const auto optimizer = make_optimizer(options, grouped);
    std::vector<std::unique_ptr<Optimizer>> each;
    for (const auto& item : single) {
      OptimizerOptions own;
      own.name = name;
      const bool decays = item.first == "body.weight" || item.first == "head";
      own.weight_decay = decays ? 0.1 : 0;
      each.push_back(make_optimizer(own, {item}));
    }
    for (int step = 0; step < 3; ++step) {
      set_random_gradients(grouped, step);
      set_random_gradients(single, step);
      optimizer->step(0.01);
      for (size_t i = 0; i < each.size(); ++i) {
        each[i]->step(single[i].first == "head" ? 0.1 : 0.01);
      }
    }
    for (size_t i = 0; i < single.size(); ++i) {
      EXPECT_TRUE(same(grouped[i].second, single[i].second))
          << name << " " << single[i].first;
    }
  }
}

TEST(GroupedOptimizer, ContinuesFromItsState) {
  NamedTensors whole = parameters_of(2);
  NamedTensors parts = parameters_of(2);
  const auto optimizer = make_optimizer(with_groups(), whole);
  auto first = make_optimizer(with_groups(), parts);
  for (int step = 0; step < 4; ++step) {
    if (step == 2) {
      NamedTensors state = first->state();
      for (auto& [name, tensor] : state) tensor = tensor.clone();
      first = make_optimizer(with_groups(), parts);
      first->load(state);
    }
    set_random_gradients(whole, step);
    set_random_gradients(parts, step);
    optimizer->step(0.01);
    first->step(0.01);
  }
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_TRUE(same(whole[i].second, parts[i].second)) << whole[i].first;
  }
  EXPECT_EQ(optimizer->held().size(), 2 * whole.size());
}

TEST(GroupedOptimizer, RejectsWrongGroupsAndStates) {
  const NamedTensors parameters = parameters_of(3);
  OptimizerOptions options = with_groups();
  options.groups[0].lr_factor = -1;
  EXPECT_NE(error_of([&] {
              make_optimizer(options, parameters);
            }).find("expected an lr_factor of 0 or more, got -1"),
            std::string::npos);
  options.groups[0] = {};
  EXPECT_NE(error_of([&] {
              make_optimizer(options, parameters);
            }).find("which parameters it contains"),
            std::string::npos);
  const auto optimizer = make_optimizer(with_groups(), parameters);
  EXPECT_NE(error_of([&] {
              optimizer->load({{"exp_avg.other", torch::zeros({1})}});
            }).find("'exp_avg.other'"),
            std::string::npos);
}

}  // namespace
}  // namespace reprise
