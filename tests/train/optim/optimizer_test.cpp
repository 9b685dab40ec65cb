#include "memory/failure.h"
#include "support.h"
#include "train/optim/optimizer_values.h"

#include <reprise/memory/meter.h>
#include <reprise/ops/weight_copies.h>
#include <reprise/train/optimizer.h>

#include <nlohmann/json.hpp>

#include <cmath>
#include <map>
#include <optional>

namespace reprise {
namespace {

using nlohmann::json;
using testing::copy_of;
using testing::error_of;
using testing::on_device;
using testing::optimizer_values;
using testing::relative_error;
using testing::same;
using torch::Tensor;

OptimizerOptions options_of(const json& given) {
  OptimizerOptions options;
  options.name = given.at("name");
  options.momentum = given.value("momentum", options.momentum);
  options.nesterov = given.value("nesterov", options.nesterov);
  options.beta1 = given.value("beta1", options.beta1);
  options.beta2 = given.value("beta2", options.beta2);
  options.eps = given.value("eps", options.eps);
  options.weight_decay = given.value("weight_decay", options.weight_decay);
  return options;
}

Tensor read(const json& values, const std::string& name,
            torch::ScalarType type) {
  return torch::tensor(values.at(name).get<std::vector<double>>(),
                       torch::kDouble)
      .view(optimizer_values()["shapes"][name].get<std::vector<int64_t>>())
      .to(on_device(type));
}

NamedTensors start(torch::ScalarType type = torch::kFloat) {
  NamedTensors parameters;
  for (const auto& [name, values] : optimizer_values()["start"].items()) {
    parameters.emplace_back(
        name, read(optimizer_values()["start"], name, type).requires_grad_());
  }
  return parameters;
}

std::map<std::string, Tensor> by_name(const NamedTensors& tensors) {
  return {tensors.begin(), tensors.end()};
}

int count() {
  return static_cast<int>(optimizer_values()["rates"].size());
}

/// Sets the gradients of update `k` of the fixture.
void set_gradients(const NamedTensors& parameters, int k) {
  const json& gradients = optimizer_values()["gradients"][k];
  for (const auto& [name, parameter] : parameters) {
    parameter.mutable_grad() =
        gradients.contains(name)
            ? read(gradients, name, parameter.scalar_type())
            : Tensor();
  }
}

/// Runs update `k` of the fixture.
void step(Optimizer& optimizer, const NamedTensors& parameters, int k) {
  set_gradients(parameters, k);
  optimizer.step(optimizer_values()["rates"][k]);
}

void expect_near(const NamedTensors& parameters, const json& expected,
                 double tolerance, const std::string& what) {
  for (const auto& [name, parameter] : parameters) {
    EXPECT_LT(relative_error(read(expected, name, torch::kDouble), parameter),
              tolerance)
        << what << " " << name;
  }
}

TEST(Optimizer, MatchesTorchOptimAndReferenceAdafactor) {
  for (const auto& [name, test] : optimizer_values()["cases"].items()) {
    for (const auto type : {torch::kDouble, torch::kFloat}) {
      const double tolerance = type == torch::kDouble ? 1e-12 : 1e-6;
      const auto parameters = start(type);
      const auto optimizer =
          make_optimizer(options_of(test["options"]), parameters);
      for (int k = 0; k < count(); ++k) {
        step(*optimizer, parameters, k);
        if (k == 1) expect_near(parameters, test["second"], tolerance, name);
      }
      expect_near(parameters, test["last"], tolerance, name);
    }
  }
}

TEST(Optimizer, ContinuesBitIdenticallyAfterLoading) {
  for (const auto& [name, test] : optimizer_values()["cases"].items()) {
    const auto options = options_of(test["options"]);
    const auto parameters = start();
    const auto optimizer = make_optimizer(options, parameters);
    for (int k = 0; k < 3; ++k) step(*optimizer, parameters, k);
    const auto resumed_parameters = copy_of(parameters);
    const auto saved = copy_of(optimizer->state());
    const auto resumed = make_optimizer(options, resumed_parameters);
    // Load over an existing state, which must be replaced completely.
    if (name == "adam") {
      const auto elsewhere = copy_of(parameters);
      const auto used = make_optimizer(options, elsewhere);
      step(*used, elsewhere, 4);
      resumed->load(used->state());
    }
    resumed->load(optimizer->state());
    for (int k = 3; k < count(); ++k) {
      step(*optimizer, parameters, k);
      step(*resumed, resumed_parameters, k);
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_TRUE(same(parameters[i].second, resumed_parameters[i].second))
          << name << " " << parameters[i].first;
    }
    const auto states = by_name(resumed->state());
    EXPECT_EQ(states.size(), saved.size());
    for (const auto& [key, tensor] : optimizer->state()) {
      EXPECT_TRUE(same(tensor, states.at(key))) << name << " " << key;
    }
  }
}

TEST(Optimizer, StateIsNamedAndOwned) {
  const auto parameters = start();
  OptimizerOptions options;
  const auto optimizer = make_optimizer(options, parameters);
  EXPECT_TRUE(optimizer->state().empty());
  step(*optimizer, parameters, 0);
  auto state = by_name(optimizer->state());
  // The fixture's bias has no gradient in the first update.
  EXPECT_EQ(state.count("exp_avg.fc.bias"), 0u);
  EXPECT_EQ(state.at("step.fc.bias").item<int64_t>(), 0);
  step(*optimizer, parameters, 1);
  state = by_name(optimizer->state());
  EXPECT_EQ(state.size(), 8u);
  EXPECT_EQ(state.at("step").item<int64_t>(), 2);
  EXPECT_EQ(state.at("step").scalar_type(), torch::kLong);
  EXPECT_EQ(state.at("step.fc.bias").item<int64_t>(), 1);
  const auto again = by_name(optimizer->state());
  for (const char* name : {"exp_avg.fc.weight", "exp_avg_sq.conv.weight"}) {
    EXPECT_TRUE(state.at(name).is_alias_of(again.at(name))) << name;
    EXPECT_EQ(state.at(name).device(), testing::device()) << name;
  }

  options.name = "sgd";
  options.momentum = 0.5;
  const auto sgd = make_optimizer(options, parameters);
  step(*sgd, parameters, 1);
  EXPECT_EQ(by_name(sgd->state()).count("momentum.fc.bias"), 1u);
}

TEST(Optimizer, AdafactorStoresRowAndColumnMeans) {
  const auto weight = torch::ones({300, 200}, on_device()).requires_grad_();
  const auto bias = torch::ones({7}, on_device()).requires_grad_();
  weight.mutable_grad() = torch::ones_like(weight);
  bias.mutable_grad() = torch::ones_like(bias);
  OptimizerOptions options;
  options.name = "adafactor";
  const auto optimizer = make_optimizer(options, {{"w", weight}, {"b", bias}});
  optimizer->step(0.1);
  const auto state = by_name(optimizer->state());
  EXPECT_EQ(state.at("row.w").sizes(), (std::vector<int64_t>{300}));
  EXPECT_EQ(state.at("col.w").sizes(), (std::vector<int64_t>{200}));
  EXPECT_EQ(state.at("square.b").sizes(), (std::vector<int64_t>{7}));
  EXPECT_EQ(state.size(), 4u);
}

TEST(Optimizer, DoesNotChangeGradientsAndOtherParameters) {
  for (const auto& [name, test] : optimizer_values()["cases"].items()) {
    const auto parameters = start();
    const auto before = copy_of(parameters);
    const auto optimizer =
        make_optimizer(options_of(test["options"]), parameters);
    step(*optimizer, parameters, 0);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto& [key, parameter] = parameters[i];
      if (parameter.grad().defined()) {
        EXPECT_TRUE(
            same(parameter.grad(), read(optimizer_values()["gradients"][0], key,
                                        parameter.scalar_type())))
            << name;
      } else {
        EXPECT_TRUE(same(parameter, before[i].second)) << name;
      }
      EXPECT_TRUE(parameter.requires_grad()) << name;
    }
  }
}

/// Copies of weights, and parameters in host memory, depend on it.
TEST(Optimizer, CountsChangesOfParameters) {
  for (const std::string& name : optimizer_names()) {
    OptimizerOptions options;
    options.name = name;
    NamedTensors parameters = start();
    const auto optimizer = make_optimizer(options, parameters);
    std::vector<int64_t> versions;
    for (auto& [key, parameter] : parameters) {
      parameter.mutable_grad() = torch::ones_like(parameter);
      versions.push_back(parameter._version());
    }
    optimizer->step(0.1);
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_GT(parameters[i].second._version(), versions[i]) << name;
    }
  }
}

TEST(Optimizer, AcceptsGradientsWithOtherStrides) {
  for (const auto& name : optimizer_names()) {
    OptimizerOptions options;
    options.name = name;
    const auto a = torch::ones({4, 6}, on_device()).requires_grad_();
    const auto b = torch::ones({4, 6}, on_device()).requires_grad_();
    const auto gradient = torch::arange(24, on_device()).view({4, 6}) - 7;
    a.mutable_grad() = gradient;
    b.mutable_grad() = gradient.t().contiguous().t();
    make_optimizer(options, {{"a", a}})->step(0.1);
    make_optimizer(options, {{"b", b}})->step(0.1);
    EXPECT_LT(relative_error(a, b), 1e-6) << name;
  }
}

TEST(Optimizer, UpdatesTiedWeightsOnce) {
  const auto weight = torch::ones({2}, on_device()).requires_grad_();
  weight.mutable_grad() = torch::ones({2}, on_device());
  OptimizerOptions options;
  options.name = "sgd";
  make_optimizer(options, {{"in", weight}, {"out", weight}})->step(0.25);
  EXPECT_TRUE(same(weight, torch::full({2}, 0.75, on_device())));
}

TEST(Optimizer, BoundsTemporaryMemory) {
  constexpr int64_t kMiB = 1 << 20;
  NamedTensors parameters;
  for (int i = 0; i < 3; ++i) {
    const auto parameter =
        torch::ones({4, 1024, 1024}, on_device()).requires_grad_();
    parameter.mutable_grad() = torch::ones_like(parameter);
    parameters.emplace_back(std::to_string(i), parameter);
  }
  for (const auto& name : optimizer_names()) {
    OptimizerOptions options;
    options.name = name;
    options.weight_decay = 0.1;
    const auto optimizer = make_optimizer(options, parameters);
    optimizer->step(0.1);
    const MemoryMeter meter(testing::device());
    optimizer->step(0.1);
    EXPECT_LE(meter.peak_increase_bytes(), 33 * kMiB) << name;
  }
}

/// Whichever allocation fails, no value changes and the step can be repeated.
TEST(Optimizer, IsUnchangedByAFailedAllocation) {
  if (!testing::device().is_cpu()) {
    GTEST_SKIP() << "failures are injected on the CPU";
  }
  for (const auto& name : optimizer_names()) {
    OptimizerOptions options;
    options.name = name;
    options.weight_decay = 0.1;
    options.momentum = name == "sgd" ? 0.9 : 0;
    const auto whole = start();
    const auto undisturbed = make_optimizer(options, whole);
    const auto parameters = start();
    const auto optimizer = make_optimizer(options, parameters);
    int failures = 0;
    for (int k = 0; k < 2; ++k) {
      step(*undisturbed, whole, k);
      set_gradients(parameters, k);
      const auto before = copy_of(parameters);
      const double rate = optimizer_values()["rates"][k];
      for (int64_t after = 0;; ++after) {
        const AllocationFailure failure(after);
        try {
          optimizer->step(rate);
          break;
        } catch (const c10::Error& error) {
          ASSERT_TRUE(is_out_of_memory(error)) << error.what();
        }
        ++failures;
        for (size_t i = 0; i < parameters.size(); ++i) {
          EXPECT_TRUE(same(parameters[i].second, before[i].second)) << name;
        }
      }
      for (size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_TRUE(same(parameters[i].second, whole[i].second)) << name;
      }
    }
    EXPECT_GT(failures, 2) << name;
  }
}

TEST(Optimizer, RejectsOptionsOutOfRange) {
  const auto error = [](auto&& change) {
    OptimizerOptions options;
    change(options);
    return error_of([&] { make_optimizer(options, start()); });
  };
  using O = OptimizerOptions;
  const auto names = error([](O& o) { o.name = "adma"; });
  EXPECT_NE(names.find("[make_optimizer] expected one of sgd, adam, adamw, "
                       "adam8bit, adamw8bit, adafactor, got 'adma'"),
            std::string::npos)
      << names;
  const std::map<std::string, std::string> errors = {
      {"momentum of 0 or more, got -1", error([](O& o) { o.momentum = -1; })},
      {"beta1 in [0, 1), got 1", error([](O& o) { o.beta1 = 1; })},
      {"beta2 in [0, 1), got 1.5", error([](O& o) { o.beta2 = 1.5; })},
      {"eps above 0, got 0", error([](O& o) { o.eps = 0; })},
      {"weight_decay of 0 or more", error([](O& o) { o.weight_decay = -1; })},
      {"momentum above 0 with nesterov",
       error([](O& o) { o.nesterov = true; })},
  };
  for (const auto& [expected, got] : errors) {
    EXPECT_NE(got.find("[make_optimizer] expected " + expected),
              std::string::npos)
        << got;
  }
  EXPECT_NE(error_of([] {
              const auto t = torch::ones(1);
              make_optimizer({}, {{"a", t}, {"a", torch::ones(1)}});
            }).find("'a' twice"),
            std::string::npos);
  EXPECT_NE(error_of([] {
              make_optimizer({}, start())->step(-1);
            }).find("expected a learning rate of 0 or more, got -1"),
            std::string::npos);
}

TEST(Optimizer, RejectsAnInvalidStateAndKeepsItsOwn) {
  const auto parameters = start();
  const auto optimizer = make_optimizer({}, parameters);
  for (int k = 0; k < 2; ++k) step(*optimizer, parameters, k);
  const auto before = copy_of(optimizer->state());
  const auto expect_error = [&](const std::string& part, auto&& change) {
    auto state = by_name(copy_of(optimizer->state()));
    for (auto& [name, tensor] : state) {
      if (name != "step" && name != "step.fc.bias") tensor.fill_(7);
    }
    change(state);
    const auto error = error_of([&] {
      optimizer->load({state.begin(), state.end()});
    });
    EXPECT_NE(error.find(part), std::string::npos) << part << ": " << error;
    const auto after = by_name(optimizer->state());
    for (const auto& [name, tensor] : before) {
      EXPECT_TRUE(same(tensor, after.at(name))) << part << " " << name;
    }
  };
  using State = std::map<std::string, Tensor>;
  expect_error("unknown 'exp_avg.other'",
               [](State& state) { state["exp_avg.other"] = torch::ones(3); });
  expect_error("'exp_avg.fc.weight', got Float [2]", [](State& state) {
    state["exp_avg.fc.weight"] = torch::ones(2);
  });
  expect_error("a tensor as 'exp_avg.fc.weight' after 2 updates, got none",
               [](State& state) { state.erase("exp_avg.fc.weight"); });
  expect_error("expected a 'step' above 0",
               [](State& state) { state.erase("step"); });
  expect_error("one int64 as 'step'",
               [](State& state) { state["step"] = torch::ones(1); });
  expect_error("expected nothing as 'exp_avg.fc.bias' after 0 updates",
               [](State& state) { state["step.fc.bias"].zero_(); });
}

TEST(Optimizer, LoadsAnEmptyStateAsInitialState) {
  const auto parameters = start();
  const auto optimizer = make_optimizer({}, parameters);
  step(*optimizer, parameters, 0);
  optimizer->load({});
  EXPECT_TRUE(optimizer->state().empty());
}

/// Adam's formula in double precision.
void reference_step(Tensor& p, Tensor& m, Tensor& v, const Tensor& g, int t,
                    const OptimizerOptions& options, double lr) {
  p.mul_(1 - lr * options.weight_decay);
  m = options.beta1 * m + (1 - options.beta1) * g;
  v = options.beta2 * v + (1 - options.beta2) * g * g;
  const auto mean = m / (1 - std::pow(options.beta1, t));
  const auto square = v / (1 - std::pow(options.beta2, t));
  p -= lr * mean / (square.sqrt() + options.eps);
}

TEST(Optimizer, AdamWUpdatesManyTensorsAndTheirHalfPrecisionCopies) {
  OptimizerOptions options;
  options.name = "adamw";
  options.weight_decay = 0.1;
  NamedTensors parameters;
  std::vector<Tensor> weights, means, squares, values;
  torch::manual_seed(3);
  // More than a launch takes, of sizes that no vector divides, one of them a view that is
  // not aligned.
  for (int64_t i = 0; i < 60; ++i) {
    const int64_t rows = i == 7 ? 4099 : 1 + i % 5, columns = 1 + i % 7;
    Tensor weight = torch::randn({rows, columns}, on_device());
    if (i == 9)
      weight = torch::randn({rows * columns + 1}, on_device())
                   .narrow(0, 1, rows * columns)
                   .view({rows, columns});
    weight.requires_grad_();
    parameters.emplace_back("p" + std::to_string(i), weight);
    weights.push_back(weight);
    values.push_back(weight.detach().cpu().to(torch::kDouble));
    means.push_back(torch::zeros_like(values.back()));
    squares.push_back(torch::zeros_like(values.back()));
  }
  const auto optimizer = make_optimizer(options, parameters);
  WeightCopies copies(weights, torch::kBFloat16);
  for (int t = 1; t <= 3; ++t) {
    for (size_t i = 0; i < weights.size(); ++i) {
      const Tensor g = torch::randn_like(weights[i]);
      weights[i].mutable_grad() = g;
      reference_step(values[i], means[i], squares[i],
                     g.cpu().to(torch::kDouble), t, options, 0.01);
    }
    copies.expire();
    const int64_t version = weights[0]._version();
    optimizer->step(0.01);
    EXPECT_GT(weights[0]._version(), version);
    // Copies that the update has written are up to date, others are after refresh().
    for (int pass = 0; pass < 2; ++pass) {
      for (const Tensor& weight : weights) {
        const Tensor copy = WeightCopies::find(weight, torch::kBFloat16);
        if (pass == 0 && !copy.defined()) continue;
        EXPECT_TRUE(torch::equal(copy, weight.detach().to(torch::kBFloat16)));
      }
      copies.refresh();
    }
    for (size_t i = 0; i < weights.size(); ++i) {
      EXPECT_LT(relative_error(weights[i].detach().cpu().to(torch::kDouble),
                               values[i]),
                1e-6)
          << i << " after " << t;
    }
  }
}

TEST(Optimizer, UpdatesWeightsThatHaveTheirCopiesInside) {
  for (const char* name : {"adamw", "adam", "sgd", "adafactor"}) {
    OptimizerOptions options;
    options.name = name;
    options.weight_decay = 0.1;
    const auto make = [] {
      torch::manual_seed(3);
      NamedTensors parameters;
      for (const auto& [rows, columns] :
           {std::pair<int64_t, int64_t>{3, 8}, {130, 776}, {64, 24}, {5, 12}}) {
        parameters.emplace_back(
            "weight" + std::to_string(rows),
            torch::randn({rows, columns}, on_device()).requires_grad_());
      }
      parameters.emplace_back("bias",
                              torch::randn({19}, on_device()).requires_grad_());
      return parameters;
    };
    const auto updated = [&](bool split) {
      const NamedTensors parameters = make();
      std::vector<Tensor> weights;
      for (const auto& [label, parameter] : parameters) {
        weights.push_back(parameter);
      }
      const auto optimizer = make_optimizer(options, parameters);
      std::optional<WeightCopies> copies;
      if (split) {
        copies.emplace(weights, torch::kBFloat16,
                       WeightCopiesOptions{.split = true});
      }
      for (int k = 0; k < 4; ++k) {
        if (copies) copies->refresh();
        // They are split at their first use.
        for (const Tensor& weight : weights) {
          WeightCopies::find(weight, torch::kBFloat16);
        }
        EXPECT_EQ(WeightCopies::is_split(weights[1]), split);
        EXPECT_FALSE(WeightCopies::is_split(weights[3]));  // odd rows
        for (Tensor& weight : weights) {
          weight.mutable_grad() = torch::randn_like(weight);
        }
        if (copies) copies->expire_for_update();
        optimizer->step(0.01);
        const bool in_place =
            testing::device().is_cuda() && std::string(name).find("adam") == 0;
        EXPECT_EQ(WeightCopies::is_split(weights[1]), split && in_place)
            << name;
        // Its copy is that of the new values, or none.
        const Tensor copy = WeightCopies::find(weights[1], torch::kBFloat16);
        EXPECT_EQ(copy.defined(), split && in_place) << name;
      }
      copies.reset();
      std::vector<Tensor> values;
      for (const Tensor& weight : weights) {
        values.push_back(weight.detach().clone());
      }
      return values;
    };
    const auto wanted = updated(false), got = updated(true);
    for (size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_TRUE(same(got[i], wanted[i])) << name << " " << i;
    }
  }
}

}  // namespace
}  // namespace reprise
