#include "compat/autocast.h"
#include "support.h"

#include <reprise/memory/kept.h>
#include <reprise/memory/meter.h>
#include <reprise/ops/norm.h>

#include <torch/nn/modules/normalization.h>

#include <cmath>
#include <string>

namespace reprise {
namespace {

using ops::MaxPoolOptions;
using ops::NormActivation;
using ops::NormActOptions;
using testing::on_device;
using testing::relative_error;
using testing::same;
using testing::take_gradients;
using torch::Tensor;
using torch::nn::BatchNorm2d;
using torch::nn::GroupNorm;

constexpr auto kChannelsLast = at::MemoryFormat::ChannelsLast;

struct NormSize {
  int64_t samples, channels, height, width, groups;  // 0: BatchNorm
};

// Odd sides; planes of several parts, of less than one block, and of one value; channels
// that are multiples of 8, of 4, and of neither; more than one block of columns.
const NormSize kNormSizes[] = {
    {3, 4, 5, 6, 0},     {3, 4, 5, 7, 0},     {2, 8, 7, 9, 2},
    {3, 6, 8, 8, 0},     {1, 3, 130, 129, 0}, {1, 16, 6, 6, 2},
    {1, 2, 131, 133, 1}, {4, 3, 1, 1, 0},     {1, 8, 2, 2, 1},
    {3, 24, 9, 8, 0},    {2, 320, 5, 7, 0},   {2, 64, 6, 5, 8},
    {4, 16, 1, 1, 0},    {2, 12, 40, 33, 3},
};

struct NamedOptions {
  std::string name;
  NormActOptions options;
  bool residual = false;
};

NamedOptions with_pool(const std::string& name, const MaxPoolOptions& pool,
                       NormActivation activation = NormActivation::kRelu,
                       bool compact = false) {
  NormActOptions options;
  options.activation = activation;
  options.pool = pool;
  options.compact_pool = compact;
  return {name, options};
}

std::vector<NamedOptions> all_options() {
  std::vector<NamedOptions> all;
  for (const auto& [name, activation] :
       {std::pair{"none", NormActivation::kNone},
        {"relu", NormActivation::kRelu},
        {"silu", NormActivation::kSilu}}) {
    NormActOptions options;
    options.activation = activation;
    all.push_back({name, options});
    all.push_back({std::string(name) + ", residual", options, true});
  }
  all.push_back(with_pool("relu, pool 2", {}));
  all.push_back(
      with_pool("relu, compact pool 2", {}, NormActivation::kRelu, true));
  all.push_back(with_pool("relu, pool 3/2", {3, 2, 1}));
  all.push_back(with_pool("relu, pool 3/1", {3, 1, 1}));
  all.push_back(with_pool("none, pool 3/2", {3, 2, 1}, NormActivation::kNone));
  all.push_back(with_pool("silu, pool 2", {}, NormActivation::kSilu));
  all.push_back(
      with_pool("silu, compact pool 2", {}, NormActivation::kSilu, true));
  return all;
}

bool fits(const NamedOptions& named, const NormSize& size) {
  const auto& pool = named.options.pool;
  return !pool || (size.height + 2 * pool->padding >= pool->kernel &&
                   size.width >= pool->kernel);
}

struct Normed {
  Tensor y;
  Tensors gradients;
  Tensors buffers;
};

BatchNorm2d make_batch_norm(int64_t channels) {
  BatchNorm2d norm(channels);
  norm->to(testing::device());
  const torch::NoGradGuard no_grad;
  norm->weight
      .normal_();  // a negative weight turns the maximum into the minimum
  norm->bias.normal_();
  return norm;
}

GroupNorm make_group_norm(int64_t groups, int64_t channels) {
  GroupNorm norm(torch::nn::GroupNormOptions(groups, channels));
  norm->to(testing::device());
  const torch::NoGradGuard no_grad;
  norm->weight.normal_();
  norm->bias.normal_();
  return norm;
}

/// The sequence of LibTorch's operators in double precision, on the CPU.
template <class Norm>
Tensor plain(Norm norm, const Tensor& x, const Tensor& residual,
             const NormActOptions& options) {
  Tensor y = norm->forward(x);
  if (residual.defined()) y = y + residual;
  if (options.activation == NormActivation::kRelu) y = torch::relu(y);
  if (options.activation == NormActivation::kSilu) y = y * torch::sigmoid(y);
  if (!options.pool) return y;
  return torch::max_pool2d(y, options.pool->kernel, options.pool->step(),
                           options.pool->padding);
}

/// Two passes, so that running statistics are updated twice. `forward` gets the norm, x
/// and the residual. `type`: to which the gradients are rounded.
template <class Norm, class F>
Normed run(Norm norm, const Tensor& values, const Tensor& residual,
           const F& forward, torch::ScalarType type = torch::kFloat) {
  const Tensor x = values.detach().clone().requires_grad_();
  const Tensor added = residual.defined()
                           ? residual.detach().clone().requires_grad_()
                           : Tensor();
  Normed outcome;
  for (int i = 0; i < 2; ++i) {
    outcome.y = forward(norm, x * (1 + i), added);
    // A gradient that differs from element to element. Without a mean, the gradient of the
    // bias would be nothing but rounding errors.
    const Tensor slope =
        torch::arange(outcome.y.numel(), torch::dtype(torch::kFloat))
            .mul_(0.7)
            .sin_()
            .add_(0.3)
            .view(outcome.y.sizes())
            .to(type)
            .to(outcome.y.options());
    outcome.y.backward(slope);
  }
  Tensors inputs = {x, norm->weight, norm->bias};
  if (added.defined()) inputs.push_back(added);
  outcome.gradients = take_gradients(inputs);
  for (const Tensor& buffer : norm->buffers()) {
    outcome.buffers.push_back(buffer.to(torch::kFloat).clone());
  }
  outcome.y = outcome.y.detach();
  return outcome;
}

double error_of_double(const Tensor& got, const Tensor& wanted) {
  const Tensor off = got.cpu().to(torch::kDouble) - wanted;
  // A ReLU may zero everything.
  return off.norm().item<double>() / (wanted.norm().item<double>() + 1e-9);
}

/// Compares with double precision. `one` is used up: its buffers are updated.
template <class Norm>
void expect_like_double(Norm one, Norm exact, const Tensor& values,
                        const NamedOptions& named) {
  {
    const torch::NoGradGuard no_grad;
    exact->to(torch::kCPU, torch::kDouble);
    exact->weight.copy_(one->weight);
    exact->bias.copy_(one->bias);
  }
  const Tensor residual = named.residual ? torch::randn_like(values) : Tensor();
  const auto to_double = [](const Tensor& t) {
    return t.defined() ? t.cpu().to(torch::kDouble).contiguous() : t;
  };
  const Normed wanted = run(
      exact, to_double(values), to_double(residual),
      [&](Norm norm, const Tensor& x, const Tensor& added) {
        return plain(norm, x, added, named.options);
      },
      values.scalar_type());
  const Normed got = run(
      one, values, residual,
      [&](Norm norm, const Tensor& x, const Tensor& added) {
        NormActOptions options = named.options;
        options.residual = added;
        return ops::norm_act(norm, x, options);
      },
      values.scalar_type());
  EXPECT_EQ(got.y.sizes(), wanted.y.sizes());
  EXPECT_EQ(got.y.scalar_type(), values.scalar_type());
  // A maximum that is a tie in half precision passes its gradient to another element.
  const bool single = values.scalar_type() == torch::kFloat;
  const double rounding = single ? 5e-5 : 2e-2;
  // Rounding may move a value across the zero of a ReLU, which is much of a small tensor.
  const bool cuts =
      !single && named.options.activation == NormActivation::kRelu;
  const double one_value =
      cuts ? std::sqrt(2.0 / static_cast<double>(wanted.y.numel())) : 0;
  EXPECT_LT(error_of_double(got.y, wanted.y), rounding);
  for (size_t i = 0; i < wanted.gradients.size(); ++i) {
    EXPECT_LT(error_of_double(got.gradients[i], wanted.gradients[i]),
              (named.options.pool && !single ? 10 : 4) * rounding + one_value)
        << i;
  }
  ASSERT_EQ(got.buffers.size(), wanted.buffers.size());
  for (size_t i = 0; i < wanted.buffers.size(); ++i) {
    EXPECT_LT(error_of_double(got.buffers[i], wanted.buffers[i]),
              single ? 5e-6 : 1e-3)
        << i;
  }
}

Tensor draw_values(const NormSize& size, at::MemoryFormat format,
                   torch::ScalarType type = torch::kFloat) {
  return torch::randn({size.samples, size.channels, size.height, size.width},
                      on_device(torch::kFloat))
      .mul_(2)
      .add_(5)
      .to(type)
      .contiguous(format);
}

void expect_like_double(const NormSize& size, const Tensor& values) {
  for (const NamedOptions& named : all_options()) {
    if (!fits(named, size)) continue;
    SCOPED_TRACE(::testing::Message()
                 << values.sizes() << " " << values.scalar_type() << " groups "
                 << size.groups << ": " << named.name);
    if (size.groups == 0) {
      expect_like_double(make_batch_norm(size.channels),
                         BatchNorm2d(size.channels), values, named);
    } else {
      expect_like_double(
          make_group_norm(size.groups, size.channels),
          GroupNorm(torch::nn::GroupNormOptions(size.groups, size.channels)),
          values, named);
    }
  }
}

TEST(NormAct, MatchesDoublePrecision) {
  torch::manual_seed(3);
  for (const NormSize& size : kNormSizes) {
    expect_like_double(size, draw_values(size, at::MemoryFormat::Contiguous));
  }
}

TEST(NormAct, MatchesDoublePrecisionInChannelsLast) {
  torch::manual_seed(4);
  for (const NormSize& size : kNormSizes) {
    expect_like_double(size, draw_values(size, kChannelsLast));
  }
}

TEST(NormAct, MatchesDoublePrecisionInHalf) {
  // LibTorch 1.13 has no norms in half precision on the CPU with float32 weights.
  if (!testing::device().is_cuda()) GTEST_SKIP() << "CUDA only";
  torch::manual_seed(5);
  for (const NormSize& size : kNormSizes) {
    if (size.samples * size.height * size.width < 60) continue;
    for (const auto type : {torch::kHalf, torch::kBFloat16}) {
      expect_like_double(size, draw_values(size, kChannelsLast, type));
    }
  }
}

TEST(NormAct, StatisticsDoNotCancel) {
  torch::manual_seed(6);
  for (const auto format : {at::MemoryFormat::Contiguous, kChannelsLast}) {
    const Tensor x = torch::randn({4, 8, 30, 31}, on_device(torch::kFloat))
                         .add_(3000)
                         .contiguous(format);
    BatchNorm2d norm(8);
    norm->to(testing::device());
    (void)ops::norm_act(norm, x);
    const Tensor exact = x.cpu().to(torch::kDouble).transpose(0, 1).flatten(1);
    const Tensor variance =
        norm->running_var.cpu().to(torch::kDouble).sub(0.9).div(0.1);
    EXPECT_LT(relative_error(exact.var(1), variance), 1e-4);
  }
}

TEST(NormAct, KeepsTypeAndLayoutUnderAutocast) {
  if (!testing::device().is_cuda()) GTEST_SKIP() << "CUDA only";
  compat::AutocastState state;
  state.cuda_enabled = true;
  state.cuda_dtype = torch::kBFloat16;
  const compat::AutocastGuard autocast(state);
  const Tensor x =
      draw_values({2, 16, 6, 6, 0}, kChannelsLast, torch::kBFloat16);
  const Tensor y = ops::norm_act(make_batch_norm(16), x);
  EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
  EXPECT_TRUE(y.is_contiguous(kChannelsLast));
}

TEST(NormAct, IsReproducible) {
  torch::manual_seed(4);
  for (const auto format : {at::MemoryFormat::Contiguous, kChannelsLast}) {
    const BatchNorm2d norm = make_batch_norm(8);
    const Tensor x = draw_values({2, 8, 200, 190, 0}, format);
    const auto once = [](const BatchNorm2d& n, const Tensor& values,
                         const Tensor&) {
      return ops::norm_act(n, values, {.pool = MaxPoolOptions{}});
    };
    const Normed first = run(norm, x, {}, once);
    const Normed second = run(norm, x, {}, once);
    EXPECT_TRUE(torch::equal(first.y, second.y));
    for (size_t i = 0; i < first.gradients.size(); ++i) {
      EXPECT_TRUE(torch::equal(first.gradients[i], second.gradients[i])) << i;
    }
  }
}

TEST(NormAct, EvaluationUsesRunningStatistics) {
  torch::manual_seed(5);
  BatchNorm2d norm = make_batch_norm(8);
  for (const auto format : {at::MemoryFormat::Contiguous, kChannelsLast}) {
    const Tensor x = draw_values({2, 8, 6, 6, 0}, format);
    norm->train();
    (void)ops::norm_act(norm, x);
    norm->eval();
    const torch::NoGradGuard no_grad;
    const Tensor before = norm->running_mean.clone();
    EXPECT_TRUE(same(ops::norm_act(norm, x), torch::relu(norm->forward(x))));
    EXPECT_TRUE(same(before, norm->running_mean));
  }
}

TEST(NormAct, PropagatesNaN) {
  GroupNorm norm(torch::nn::GroupNormOptions(1, 8));
  norm->to(testing::device());
  for (const auto format : {at::MemoryFormat::Contiguous, kChannelsLast}) {
    Tensor x = torch::randn({2, 8, 4, 4}, on_device(torch::kFloat));
    x[1][0][0][0] = std::numeric_limits<float>::quiet_NaN();
    x = x.contiguous(format);
    for (const NormActOptions& options :
         {NormActOptions{}, NormActOptions{.pool = MaxPoolOptions{}}}) {
      const Tensor y = ops::norm_act(norm, x, options);
      EXPECT_FALSE(y[0].isnan().any().item<bool>());
      EXPECT_TRUE(y[1].isnan().all().item<bool>());
    }
  }
}

TEST(NormAct, RejectsOneValuePerChannel) {
  const BatchNorm2d norm = make_batch_norm(8);
  const Tensor x = torch::randn({1, 8, 1, 1}, on_device(torch::kFloat));
  EXPECT_THROW((void)ops::norm_act(norm, x), std::exception);
}

// Tensors that begin at any element, residuals and gradients in another layout, weights
// that do not exist: the result is the same, whichever implementation runs.
TEST(NormAct, SupportsOtherOperands) {
  torch::manual_seed(7);
  const NormSize size{2, 8, 6, 5, 0};
  const Tensor x = draw_values(size, kChannelsLast);
  const Tensor storage = torch::empty({x.numel() + 1}, x.options());
  const Tensor shifted =
      storage.narrow(0, 1, x.numel()).view({2, 6, 5, 8}).permute({0, 3, 1, 2});
  shifted.copy_(x);
  const Tensor residual = torch::randn({2, 8, 6, 5}, on_device(torch::kFloat));
  const BatchNorm2d norm = make_batch_norm(8);
  const auto add = [](const BatchNorm2d& n, const Tensor& values,
                      const Tensor& added) {
    return ops::norm_act(n, values, {.residual = added});
  };
  const Normed wanted = run(norm, x, residual.contiguous(kChannelsLast), add);
  const Normed got = run(norm, x, residual, add);
  EXPECT_LT(relative_error(got.y, wanted.y), 1e-6);
  for (size_t i = 0; i < wanted.gradients.size(); ++i) {
    EXPECT_LT(relative_error(got.gradients[i], wanted.gradients[i]), 1e-5) << i;
  }
  const torch::NoGradGuard no_grad;
  EXPECT_LT(
      relative_error(add(norm, shifted, residual), add(norm, x, residual)),
      1e-5);
  BatchNorm2d without(torch::nn::BatchNormOptions(8).affine(false));
  without->to(testing::device());
  EXPECT_LT(relative_error(ops::norm_act(without, x),
                           torch::relu(without->forward(x))),
            1e-5);
}

TEST(NormAct, MatchesFallback) {
  torch::manual_seed(6);
  for (const auto format : {at::MemoryFormat::Contiguous, kChannelsLast}) {
    const Tensor x = draw_values({3, 8, 9, 8, 0}, format);
    for (const NamedOptions& named : all_options()) {
      const Tensor residual = named.residual ? torch::randn_like(x) : Tensor();
      const BatchNorm2d norm = make_batch_norm(8);
      const auto with = [&](const auto& op) {
        return run(norm, x, residual,
                   [&](const BatchNorm2d& n, const Tensor& values,
                       const Tensor& added) {
                     NormActOptions options = named.options;
                     options.residual = added;
                     return op(n, values, options);
                   });
      };
      const Normed one = with([](auto... a) { return ops::norm_act(a...); });
      const Normed other =
          with([](auto... a) { return ops::fallback::norm_act(a...); });
      EXPECT_LT(relative_error(one.y, other.y), 1e-5) << named.name;
      for (size_t i = 0; i < one.gradients.size(); ++i) {
        EXPECT_LT(relative_error(one.gradients[i], other.gradients[i]), 2e-5)
            << named.name << " " << i;
      }
    }
  }
}

TEST(NormAct, SavesInputAndStatistics) {
  if (!testing::device().is_cuda()) GTEST_SKIP() << "CUDA only";
  const Tensor x = draw_values({2, 16, 8, 8, 0}, kChannelsLast);
  const Tensor residual = torch::randn_like(x);
  const auto saved = [&](const NormActOptions& options) {
    const BatchNorm2d norm = make_batch_norm(16);
    const KeptMeter kept({x, residual, norm->weight, norm->bias});
    Tensor y;
    {
      const KeptMeter::Scope scope(kept, 0);
      y = ops::norm_act(norm, x, options);
    }
    return kept.live_bytes();
  };
  const int64_t values = x.numel();
  const int64_t statistics = 2 * allocated_bytes(16 * 4, x.device());
  EXPECT_EQ(saved({}), statistics);
  EXPECT_EQ(saved({.activation = NormActivation::kSilu}), statistics);
  EXPECT_EQ(saved({.residual = residual}), statistics + 4 * values);  // y
  EXPECT_EQ(saved({.residual = residual, .activation = NormActivation::kNone}),
            statistics);
  EXPECT_EQ(saved({.pool = MaxPoolOptions{}}), statistics + values / 4);
}

}  // namespace
}  // namespace reprise
