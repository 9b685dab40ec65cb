#include "support.h"

#include <reprise/recompute/chain.h>
#include <reprise/recompute/checkpoint.h>
#include <reprise/recompute/strategy.h>

#include <nlohmann/json.hpp>

#include <cmath>
#include <fstream>

namespace reprise {
namespace {

namespace F = torch::nn::functional;
using testing::on_device;
using testing::relative_error;
using torch::Tensor;

// The functions of fixtures/make_checkpoint_values.py.

Tensor mlp(const Tensors& in) {
  const auto hidden = torch::gelu(torch::linear(in[0], in[1], in[2]));
  return torch::layer_norm(torch::linear(hidden, in[3]), {in[3].size(0)});
}

Tensor attention(const Tensors& in) {
  const auto scores = torch::matmul(in[0], in[1].transpose(-2, -1)) /
                      std::sqrt(double(in[0].size(-1)));
  return torch::matmul(torch::softmax(scores, -1), in[2]);
}

Tensor conv_norm(const Tensors& in) {
  auto y = torch::conv2d(in[0], in[1], {}, 1, 1);
  y = torch::batch_norm(y, in[2], in[3], {}, {}, /*training=*/true, 0.1, 1e-5,
                        false);
  return torch::max_pool2d(torch::relu(y), 2);
}

Tensor tied(const Tensors& in) {
  auto h = torch::tanh(torch::matmul(in[0], in[1]));
  h = torch::tanh(torch::matmul(h, in[1].t()));
  return torch::log_softmax(torch::matmul(h, in[1]), -1);
}

struct Case {
  const char* name;
  Tensor (*function)(const Tensors&);
};
constexpr Case kCases[] = {{"mlp", mlp},
                           {"attention", attention},
                           {"conv_norm", conv_norm},
                           {"tied", tied}};

Tensor read(const nlohmann::json& json) {
  return torch::tensor(json["values"].get<std::vector<double>>(),
                       torch::kDouble)
      .view(json["shape"].get<std::vector<int64_t>>())
      .to(testing::device());
}

Tensor loss_of(const Tensor& output) {
  const auto weights =
      torch::cos(torch::arange(output.numel(), on_device(torch::kDouble)));
  return (output * weights.view_as(output)).sum();
}

nlohmann::json fixture() {
  std::ifstream file(REPRISE_FIXTURES "/checkpoint_values.json");
  return nlohmann::json::parse(file).at("cases");
}

Tensors inputs_of(const nlohmann::json& expected) {
  Tensors inputs;
  for (const auto& input : expected["inputs"]) {
    inputs.push_back(read(input).requires_grad_());
  }
  return inputs;
}

TEST(CheckpointValues, EqualPyTorch) {
  const auto cases = fixture();
  for (const Case& test : kCases) {
    const auto& expected = cases.at(test.name);
    const Tensors inputs = inputs_of(expected);
    const auto function = [&](const Tensors& in) {
      return Tensors{test.function(in)};
    };
    const auto loss = loss_of(checkpoint_list(function, inputs)[0]);
    loss.backward();
    EXPECT_NEAR(loss.item<double>(), expected["loss"].get<double>(), 1e-12)
        << test.name;
    for (size_t i = 0; i < inputs.size(); ++i) {
      EXPECT_LT(
          relative_error(read(expected["gradients"][i]), inputs[i].grad()),
          1e-12)
          << test.name << " " << i;
    }
    // The same through a chain whose single stage is recomputed.
    const auto through_chain = inputs_of(expected);
    const Chain chain({Stage(test.name, function)});
    loss_of(chain.forward(through_chain, make_schedule("checkpoints:0", 1))[0])
        .backward();
    for (size_t i = 0; i < inputs.size(); ++i) {
      EXPECT_LT(relative_error(read(expected["gradients"][i]),
                               through_chain[i].grad()),
                1e-12)
          << test.name << " " << i;
    }
  }
}

TEST(CheckpointValues, EqualFiniteDifferences) {
  const auto cases = fixture();
  constexpr double kStep = 1e-6;
  for (const Case& test : kCases) {
    const Tensors inputs = inputs_of(cases.at(test.name));
    const auto function = [&](const Tensors& in) {
      return Tensors{test.function(in)};
    };
    loss_of(checkpoint_list(function, inputs)[0]).backward();
    for (const auto& input : inputs) {
      const torch::NoGradGuard no_grad;
      const auto flat = input.view(-1);
      auto numeric = torch::zeros_like(flat);
      for (int64_t k = 0; k < flat.numel(); ++k) {
        const double value = flat[k].item<double>();
        flat[k] = value + kStep;
        const double up = loss_of(test.function(inputs)).item<double>();
        flat[k] = value - kStep;
        const double down = loss_of(test.function(inputs)).item<double>();
        flat[k] = value;
        numeric[k] = (up - down) / (2 * kStep);
      }
      EXPECT_LT(relative_error(numeric.view_as(input), input.grad()), 1e-7)
          << test.name;
    }
  }
}

}  // namespace
}  // namespace reprise
