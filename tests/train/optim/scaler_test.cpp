#include "support.h"

#include <reprise/train/optimizer.h>
#include <reprise/train/scaler.h>

#include <ATen/record_function.h>

#include <cmath>
#include <limits>

namespace reprise {
namespace {

using testing::error_of;
using testing::on_device;
using testing::same;
using torch::Tensor;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

Tensor parameter(double gradient, torch::ScalarType type = torch::kFloat) {
  const auto tensor = torch::ones({3, 2}, on_device(type)).requires_grad_();
  tensor.mutable_grad() = torch::full({3, 2}, gradient, on_device(type));
  return tensor;
}

thread_local int g_operators = 0;

std::unique_ptr<at::ObserverContext> count_operator(const at::RecordFunction&) {
  ++g_operators;
  return nullptr;
}

/// Returns the number of operators that `body` runs on this thread.
int operators_in(const std::function<void()>& body) {
  const auto handle =
      at::addThreadLocalCallback(at::RecordFunctionCallback(count_operator)
                                     .scopes({at::RecordScope::FUNCTION}));
  g_operators = 0;
  body();
  at::removeCallback(handle);
  return g_operators;
}

TEST(Scaler, DividesGradients) {
  GradScaler scaler;
  EXPECT_EQ(scaler.scale(), 65536);
  const auto a = parameter(65536 * 0.75);
  const auto b = parameter(-65536, torch::kDouble);
  const auto none = torch::ones(3, on_device()).requires_grad_();
  EXPECT_TRUE(scaler.unscale({a, none, b}));
  scaler.update();
  EXPECT_TRUE(same(a.grad(), torch::full({3, 2}, 0.75, on_device())));
  EXPECT_TRUE(
      same(b.grad(), torch::full({3, 2}, -1., on_device(torch::kDouble))));
  EXPECT_FALSE(none.grad().defined());
}

TEST(Scaler, SkipsUpdatesThatAreNotFinite) {
  for (const double bad : {kInf, -kInf, kNan}) {
    GradScaler scaler;
    const auto weight = torch::ones(4, on_device()).requires_grad_();
    const auto other = parameter(0);
    OptimizerOptions options;
    options.name = "sgd";
    const auto optimizer = make_optimizer(options, {{"weight", weight}});
    std::vector<double> scales;
    for (int k = 0; k < 4; ++k) {
      scales.push_back(scaler.scale());
      weight.mutable_grad() = Tensor();
      (weight.sum() * scaler.scale()).backward();
      // One value among finite ones.
      if (k == 1) weight.grad()[2] = bad;
      const bool good = scaler.unscale({other, weight});
      EXPECT_EQ(good, k != 1);
      if (good) optimizer->step(0.125);
      scaler.update();
    }
    EXPECT_EQ(scales, (std::vector<double>{65536, 65536, 32768, 32768}));
    EXPECT_TRUE(same(weight, torch::full(4, 1 - 3 * 0.125, on_device())));
    EXPECT_EQ(scaler.state(), (GradScaler::State{32768, 2, 1}));
  }
}

TEST(Scaler, GrowsAfterTheInterval) {
  GradScaler::Options options;
  options.scale = 8;
  options.growth_interval = 3;
  GradScaler scaler(options);
  const auto window = [&](double gradient) {
    scaler.unscale({parameter(gradient)});
    scaler.update();
    return scaler.scale();
  };
  EXPECT_EQ(window(1), 8);
  EXPECT_EQ(window(1), 8);
  EXPECT_EQ(window(1), 16);
  EXPECT_EQ(window(1), 16);
  EXPECT_EQ(window(1), 16);
  EXPECT_EQ(window(kInf), 8);  // restarts the interval
  EXPECT_EQ(window(1), 8);
  EXPECT_EQ(window(1), 8);
  EXPECT_EQ(window(1), 16);
}

TEST(Scaler, StaysInTheRangeOfAFloat) {
  GradScaler::Options options;
  options.scale = std::ldexp(1.0, 127);
  options.growth_interval = 1;
  GradScaler scaler(options);
  EXPECT_TRUE(scaler.unscale({parameter(1)}));
  scaler.update();
  EXPECT_EQ(scaler.scale(), options.scale);
}

TEST(Scaler, RestoresItsState) {
  GradScaler::Options options;
  options.growth_interval = 3;
  GradScaler scaler(options);
  scaler.load({64, 2, 5});
  EXPECT_TRUE(scaler.unscale({parameter(64)}));
  scaler.update();
  EXPECT_EQ(scaler.state(), (GradScaler::State{128, 0, 5}));
}

TEST(Scaler, RunsNoOperatorsIfDisabled) {
  GradScaler::Options options;
  options.enabled = false;
  GradScaler scaler(options);
  EXPECT_EQ(scaler.scale(), 1);
  const auto bad = parameter(kInf);
  EXPECT_EQ(operators_in([&] {
              EXPECT_TRUE(scaler.unscale({bad}));
              scaler.update();
            }),
            0);
  EXPECT_EQ(scaler.state(), GradScaler::State{});
  scaler.load({1024, 3, 1});
  EXPECT_EQ(scaler.scale(), 1);

  GradScaler on;
  EXPECT_GT(operators_in([&] { on.unscale({bad}); }), 0);
}

TEST(Scaler, RejectsCallsInTheWrongOrder) {
  GradScaler scaler;
  EXPECT_NE(error_of([&] { scaler.update(); }).find("expected unscale() first"),
            std::string::npos);
  const auto one = parameter(65536);
  scaler.unscale({one});
  EXPECT_NE(
      error_of([&] { scaler.unscale({one}); }).find("expected update() first"),
      std::string::npos);
  EXPECT_TRUE(same(one.grad(), torch::ones({3, 2}, on_device())));
}

TEST(Scaler, RejectsOptionsOutOfRange) {
  const auto expect_error = [](const std::string& part, auto&& change) {
    GradScaler::Options options;
    change(options);
    const auto error = error_of([&] { GradScaler scaler(options); });
    EXPECT_NE(error.find("[GradScaler] expected " + part), std::string::npos)
        << error;
  };
  using O = GradScaler::Options;
  expect_error("scale above 0, got 0", [](O& o) { o.scale = 0; });
  expect_error("growth of 1 or more", [](O& o) { o.growth = 0.5; });
  expect_error("backoff between 0 and 1", [](O& o) { o.backoff = 1; });
  expect_error("growth_interval of 1", [](O& o) { o.growth_interval = 0; });
}

TEST(Scaler, ThrowsIfNoScaleHelps) {
  GradScaler scaler;
  const auto error = error_of([&] {
    for (int k = 0; k < 200; ++k) {
      scaler.unscale({parameter(kNan)});
      scaler.update();
    }
  });
  EXPECT_NE(error.find("the loss itself is not finite"), std::string::npos)
      << error;
}

}  // namespace
}  // namespace reprise
