#include "compat/autocast.h"
#include "half_gemm_error.h"
#include "recompute/no_save_scope.h"
#include "support.h"

#include <reprise/memory/kept.h>
#include <reprise/memory/meter.h>
#include <reprise/ops/embedding.h>
#include <reprise/ops/loss.h>
#include <reprise/ops/weight_copies.h>
#include <reprise/recompute/checkpoint.h>

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <optional>

namespace reprise {
namespace {

using testing::device;
using testing::on_device;
using testing::relative_error;
using testing::same;
using testing::take_gradients;
using torch::Tensor;

/// A head in float32 whose operands are exact in half precision.
struct HalfHead {
  Tensor hidden, weight, bias, targets;

  Tensors operands() const {
    return bias.defined() ? Tensors{hidden, weight, bias}
                          : Tensors{hidden, weight};
  }
};

HalfHead make_half_head(int64_t rows, int64_t width, int64_t classes,
                        bool bias = false) {
  torch::manual_seed(5);
  const auto make = [](at::IntArrayRef sizes, double scale) {
    return torch::randn(sizes, on_device(torch::kFloat))
        .mul_(scale)
        .to(torch::kBFloat16)
        .to(torch::kFloat)
        .requires_grad_();
  };
  HalfHead head;
  head.hidden = make({rows, width}, 1);
  head.weight = make({classes, width}, 0.3);
  if (bias) head.bias = make({classes}, 1);
  head.targets = torch::randint(classes, {rows}, on_device(torch::kLong));
  head.targets.slice(0, 1, rows, 3).fill_(-100);
  return head;
}

/// Loss, and gradients for `factor` as loss gradient, with LibTorch in double precision.
Tensors exact_half_head(const HalfHead& head, double factor) {
  namespace F = torch::nn::functional;
  Tensors operands;
  for (const Tensor& tensor : head.operands()) {
    operands.push_back(
        tensor.detach().to(torch::kDouble).set_requires_grad(true));
  }
  Tensor scores = torch::mm(operands[0], operands[1].t());
  if (head.bias.defined()) scores = scores + operands[2];
  const Tensor loss =
      F::cross_entropy(scores, head.targets,
                       F::CrossEntropyFuncOptions().reduction(torch::kSum));
  (loss * factor).backward();
  Tensors results{loss.detach()};
  for (const Tensor& tensor : operands) results.push_back(tensor.grad());
  return results;
}

/// Chunks of `rows` rows each.
ops::LinearCrossEntropyOptions in_chunks_of(
    int64_t rows, const HalfHead& head, std::optional<bool> in_forward = true) {
  ops::LinearCrossEntropyOptions options;
  options.chunk_scores = rows * head.weight.size(0);
  options.weight_gradient = ops::WeightGradientOrder::kByRows;
  options.gradients_in_forward = in_forward;
  return options;
}

Tensor half_head_loss(const HalfHead& head,
                      const ops::LinearCrossEntropyOptions& options,
                      torch::ScalarType type = torch::kBFloat16) {
  compat::AutocastState state;
  state.cpu_enabled = state.cuda_enabled = true;
  state.cuda_dtype = type;
  const compat::AutocastGuard autocast(state);
  return ops::linear_cross_entropy(head.hidden, head.weight, head.bias,
                                   head.targets, options)
      .loss;
}

Tensors run_half_head(const HalfHead& head, double factor,
                      const ops::LinearCrossEntropyOptions& options) {
  const Tensor loss = half_head_loss(head, options);
  (loss * factor).backward();
  Tensors results{loss.detach()};
  for (const Tensor& tensor : take_gradients(head.operands())) {
    results.push_back(tensor);
  }
  return results;
}

/// Includes the rounding of the scores.
double allowed_error(const HalfHead& head) {
  const double error = std::max(testing::half_gemm_error(head.weight.size(0)),
                                testing::half_gemm_error(head.hidden.size(0)));
  return std::max(1.5e-2, 2 * error);
}

void expect_half_near(const Tensors& exact, const Tensors& got,
                      double tolerance) {
  ASSERT_EQ(exact.size(), got.size());
  EXPECT_LE(relative_error(exact[0], got[0].to(torch::kDouble)), 2e-3);
  for (size_t i = 1; i < exact.size(); ++i) {
    ASSERT_TRUE(got[i].defined()) << i;
    EXPECT_LE(relative_error(exact[i], got[i].to(torch::kDouble)), tolerance)
        << i;
  }
}

TEST(HalfCrossEntropy, GradientsInForwardMatchFloat64) {
  for (const bool bias : {false, true}) {
    for (const int64_t classes : {1, 128, 503}) {
      const HalfHead head = make_half_head(70, 32, classes, bias);
      const Tensors exact = exact_half_head(head, 1.0 / 7);
      const double allowed = allowed_error(head);
      for (const int64_t rows : {9, 30, 1000}) {
        const Tensors got =
            run_half_head(head, 1.0 / 7, in_chunks_of(rows, head));
        if (classes == 1) {
          // The softmax is 1; with the kernel up to the rounding of the log-sum-exp.
          EXPECT_LE(got[2].abs().max().item<float>(),
                    testing::device().is_cuda() ? 1e-6F : 0.0F);
          continue;
        }
        expect_half_near(exact, got, allowed);
        const Tensors later =
            run_half_head(head, 1.0 / 7, in_chunks_of(rows, head, false));
        EXPECT_TRUE(same(got[0], later[0]));
        for (size_t i = 1; i < exact.size(); ++i) {
          const auto error = [&](const Tensor& gradient) {
            return relative_error(exact[i], gradient.to(torch::kDouble));
          };
          // One more rounding to bfloat16, 2^-9 on average over random values.
          EXPECT_LE(error(got[i]), error(later[i]) + 4e-3) << i;
        }
      }
    }
  }
}

TEST(HalfCrossEntropy, LongRowsOnCuda) {
  // Rows of one, two, four and eight thread blocks, and too long for the kernel.
  if (!device().is_cuda()) GTEST_SKIP() << "only kernels depend on it";
  for (const int64_t classes : {50257, 65521, 151669, 256000, 600001}) {
    const HalfHead head = make_half_head(40, 16, classes);
    const Tensors got = run_half_head(head, 3, in_chunks_of(16, head));
    expect_half_near(exact_half_head(head, 3), got, 1e-2);
    EXPECT_TRUE(
        same(got[0], run_half_head(head, 3, in_chunks_of(16, head, false))[0]));
  }
}

TEST(HalfCrossEntropy, DefaultDependsOnDevice) {
  const HalfHead head = make_half_head(70, 32, 1003);
  const Tensors chosen = run_half_head(head, 3, in_chunks_of(8, head, {}));
  const Tensors wanted =
      run_half_head(head, 3, in_chunks_of(8, head, device().is_cuda()));
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_TRUE(same(chosen[i], wanted[i])) << i;
  }
}

TEST(HalfCrossEntropy, AddsToWeightGradient) {
  const HalfHead head = make_half_head(70, 32, 1003);
  const double factors[] = {1.0 / 7, 3, -0.25};
  Tensors sum;
  for (const double factor : factors) {
    const Tensors exact = exact_half_head(head, factor);
    if (sum.empty()) {
      sum = exact;
    } else {
      for (size_t i = 1; i < sum.size(); ++i) sum[i] += exact[i];
    }
  }
  const auto run = [&] {
    Tensor loss;
    for (const double factor : factors) {
      loss = half_head_loss(head, in_chunks_of(30, head));
      (loss * factor).backward();
    }
    const auto gradients = take_gradients(head.operands());
    expect_half_near(sum, {loss.detach(), gradients[0], gradients[1]},
                     allowed_error(head));
  };
  run();
  const WeightCopies copies({head.weight}, torch::kBFloat16);
  run();
  // Several losses in one backward.
  Tensor total;
  for (const double factor : factors) {
    const Tensor loss = half_head_loss(head, in_chunks_of(30, head)) * factor;
    total = total.defined() ? total + loss : loss;
  }
  total.backward();
  const auto gradients = take_gradients(head.operands());
  expect_half_near(sum, {sum[0], gradients[0], gradients[1]},
                   allowed_error(head));
}

TEST(HalfCrossEntropy, TiedEmbeddingAddsToSameGradient) {
  namespace F = torch::nn::functional;
  HalfHead head = make_half_head(70, 32, 303);
  const Tensor tokens = torch::randint(303, {70}, on_device(torch::kLong));
  torch::nn::Embedding table(303, 32);
  table->to(device());
  table->weight = head.weight;
  const Tensor exact = head.weight.detach().to(torch::kDouble);
  exact.requires_grad_();
  const Tensor scores = torch::mm(torch::embedding(exact, tokens), exact.t());
  (F::cross_entropy(scores, head.targets,
                    F::CrossEntropyFuncOptions().reduction(torch::kSum)) /
   7)
      .backward();
  const auto run = [&] {
    head.hidden = ops::embedding(table, tokens);
    (half_head_loss(head, in_chunks_of(30, head)) / 7).backward();
    const Tensor got = take_gradients({head.weight})[0];
    EXPECT_LE(relative_error(exact.grad(), got.to(torch::kDouble)),
              allowed_error(head));
  };
  run();
  const WeightCopies copies({head.weight}, torch::kBFloat16);
  run();
}

TEST(HalfCrossEntropy, SkipsFrozenOperands) {
  HalfHead head = make_half_head(70, 32, 303);
  const Tensors both = run_half_head(head, 3, in_chunks_of(30, head));
  const Tensor weight = head.weight, hidden = head.hidden;
  const auto saved_bytes = [&] {
    const Tensor state[] = {hidden, weight, head.targets};
    KeptMeter kept(state);
    const KeptMeter::Scope scope(kept, 0);
    const Tensor loss = half_head_loss(head, in_chunks_of(30, head));
    const int64_t bytes = kept.live_bytes();
    (loss * 3).backward();
    return bytes;
  };
  head.weight = weight.detach();
  EXPECT_LT(saved_bytes(), 303 * 32 * 4);
  EXPECT_TRUE(same(both[1], take_gradients({head.hidden})[0]));
  head.weight = weight;
  head.hidden = hidden.detach();
  EXPECT_GE(saved_bytes(), 303 * 32 * 4);
  EXPECT_TRUE(same(both[2], take_gradients({head.weight})[0]));
  head.weight = weight.detach();
  EXPECT_FALSE(half_head_loss(head, in_chunks_of(30, head)).requires_grad());
}

TEST(HalfCrossEntropy, SavesGradientsOnly) {
  const int64_t rows = 128, width = 64, classes = 1024;
  const HalfHead head = make_half_head(rows, width, classes);
  const Tensor state[] = {head.hidden, head.weight, head.targets};
  const WeightCopies copies({head.weight}, torch::kBFloat16);
  const auto options = in_chunks_of(32, head);
  const auto kept_bytes = [&](bool in_forward) {
    KeptMeter kept(state);
    const KeptMeter::Scope scope(kept, 0);
    const Tensor loss =
        half_head_loss(head, in_chunks_of(32, head, in_forward));
    return kept.live_bytes();
  };
  constexpr int64_t kSlack = 16
                             << 10;  // numbers per row, rounding of allocations
  const int64_t gradients = rows * width * 2 + classes * width * 4;
  EXPECT_GE(kept_bytes(true), gradients);
  EXPECT_LE(kept_bytes(true), gradients + kSlack);
  EXPECT_LE(kept_bytes(false), kSlack);
  run_half_head(head, 3,
                options);  // memory that libraries allocate at first use
  const Tensor loss = half_head_loss(head, options) * 3;
  MemoryMeter meter(device());
  loss.backward();
  // The memory of the weight's gradient becomes the gradient.
  EXPECT_LE(meter.peak_increase_bytes(), 4 * rows * width * 4 + kSlack);
  take_gradients(head.operands());
}

TEST(HalfCrossEntropy, ComputesNoGradientsThatAreDropped) {
  const int64_t rows = 40, width = 64, classes = 2048;
  const HalfHead head = make_half_head(rows, width, classes);
  const WeightCopies copies({head.weight}, torch::kBFloat16);
  const auto options = in_chunks_of(8, head);
  const Tensors wanted = run_half_head(head, 3, options);
  Tensor loss;
  const auto peak_of = [&](auto&& run) {
    MemoryMeter meter(device());
    loss = run();
    return meter.peak_increase_bytes();
  };
  const int64_t gradient = classes * width * 4;
  const auto plain = [&] { return half_head_loss(head, options); };
  EXPECT_GE(peak_of(plain), gradient);
  {
    const torch::NoGradGuard no_grad;
    EXPECT_LT(peak_of(plain), gradient);
    EXPECT_TRUE(same(wanted[0], loss));
  }
  {
    const NoSaveScope no_save;
    EXPECT_LT(peak_of(plain), gradient);
    EXPECT_TRUE(loss.requires_grad());
    EXPECT_TRUE(same(wanted[0], loss.detach()));
  }
  const auto checkpointed = [&] {
    return checkpoint(
        [&](const Tensor& hidden) {
          HalfHead again = head;
          again.hidden = hidden * 1;
          return half_head_loss(again, options);
        },
        head.hidden);
  };
  EXPECT_LT(peak_of(checkpointed), gradient);
  EXPECT_TRUE(same(wanted[0], loss.detach()));
  (loss * 3).backward();
  const auto gradients = take_gradients(head.operands());
  EXPECT_TRUE(same(wanted[1], gradients[0]));
  EXPECT_TRUE(same(wanted[2], gradients[1]));
}

TEST(HalfCrossEntropy, SecondBackwardComputesScoresAgain) {
  const HalfHead head = make_half_head(70, 32, 1003, /*bias=*/true);
  const Tensors exact = exact_half_head(head, 3);
  const Tensor loss = half_head_loss(head, in_chunks_of(30, head));
  for (const bool retain : {true, false}) {
    (loss * 3).backward({}, retain);
    Tensors got{loss.detach()};
    for (const Tensor& tensor : take_gradients(head.operands())) {
      got.push_back(tensor);
    }
    expect_half_near(exact, got, allowed_error(head));
  }
}

TEST(HalfCrossEntropy, AllIgnoredGivesZeros) {
  HalfHead head = make_half_head(70, 32, 303, /*bias=*/true);
  head.targets.fill_(-100);
  for (const Tensor& result : run_half_head(head, 3, in_chunks_of(30, head))) {
    EXPECT_EQ(result.abs().sum().item<float>(), 0);
  }
}

TEST(HalfCrossEntropy, SmallGradientsInFloat16) {
  // The gradient of `hidden` is below the smallest value of float16 until it is scaled.
  if (!device().is_cuda()) GTEST_SKIP() << "no float16 products on the CPU";
  HalfHead head = make_half_head(70, 64, 1003);
  {
    // Small weights, and a target with nearly all of the probability.
    const torch::NoGradGuard no_grad;
    head.weight.copy_((head.weight * 3e-4).to(torch::kHalf));
    const Tensor rows = head.weight.index_select(0, head.targets.clamp_min(0));
    head.hidden.copy_(
        (rows * 18 / rows.square().sum(1, true)).to(torch::kHalf));
  }
  const Tensors exact = exact_half_head(head, 65536);
  const auto options = in_chunks_of(16, head);
  (half_head_loss(head, options, torch::kHalf) * 65536).backward();
  const Tensor got = take_gradients(head.operands())[0];
  EXPECT_LE(relative_error(exact[1], got.to(torch::kDouble)), 5e-2);
}

}  // namespace
}  // namespace reprise
