#include "compat/saved_tensors.h"
#include "half_gemm_error.h"
#include "linear_layer.h"

#include <reprise/memory/kept.h>
#include <reprise/memory/meter.h>
#include <reprise/ops/linear.h>
#include <reprise/ops/weight_copies.h>
#include <reprise/recompute/checkpoint.h>

namespace reprise {
namespace {

using testing::device;
using testing::half;
using testing::Layer;
using testing::LinearOutcome;
using testing::make_layer;
using testing::on_device;
using testing::relative_error;
using testing::run_layer;
using testing::same;
using testing::take_gradients;
using torch::Tensor;

TEST(Linear, MatchesLibTorch) {
  for (const bool bias : {true, false}) {
    for (const auto layout :
         {ops::WeightLayout::kOutIn, ops::WeightLayout::kInOut}) {
      const Layer layer = make_layer(layout, bias);
      const Tensor weight =
          layout == ops::WeightLayout::kOutIn ? layer.weight : layer.weight.t();
      const Tensor y = ops::linear(layer.x, layer.weight, layer.bias, layout);
      const Tensor wanted = torch::linear(layer.x, weight, layer.bias);
      EXPECT_TRUE(same(
          y, ops::fallback::linear(layer.x, layer.weight, layer.bias, layout)));
      EXPECT_EQ(y.sizes(), wanted.sizes());
      EXPECT_LT(relative_error(y, wanted), 1e-6);
    }
  }
}

TEST(Linear, WithCopiesMatchesAutocast) {
  for (const bool bias : {true, false}) {
    for (const auto layout :
         {ops::WeightLayout::kOutIn, ops::WeightLayout::kInOut}) {
      const Layer layer = make_layer(layout, bias);
      const LinearOutcome exact = run_layer(layer, /*autocast=*/false);
      const LinearOutcome wanted = run_layer(layer, /*autocast=*/true);
      const WeightCopies copies({layer.weight}, torch::kBFloat16);
      const LinearOutcome got = run_layer(layer, /*autocast=*/true);
      EXPECT_EQ(got.y.scalar_type(), torch::kBFloat16);
      EXPECT_EQ(got.y.sizes(), wanted.y.sizes());
      // The same matrix product of the same values.
      EXPECT_TRUE(same(got.y, wanted.y));
      ASSERT_EQ(got.gradients.size(), wanted.gradients.size());
      for (size_t i = 0; i < got.gradients.size(); ++i) {
        ASSERT_TRUE(got.gradients[i].defined()) << i;
        EXPECT_EQ(got.gradients[i].scalar_type(), torch::kFloat);
        // Not less accurate than autocast.
        EXPECT_LT(relative_error(got.gradients[i], wanted.gradients[i]), 8e-3);
        EXPECT_LT(relative_error(got.gradients[i], exact.gradients[i]),
                  1.2 * relative_error(wanted.gradients[i], exact.gradients[i]))
            << i;
      }
    }
  }
}

TEST(Linear, DirectGradientsInFloat32) {
  for (const auto layout :
       {ops::WeightLayout::kOutIn, ops::WeightLayout::kInOut}) {
    const Layer layer = make_layer(layout);
    const LinearOutcome wanted = run_layer(layer, /*autocast=*/false);
    const WeightCopies none({layer.weight}, torch::kFloat);
    EXPECT_TRUE(none.copies().empty());
    const LinearOutcome got = run_layer(layer, /*autocast=*/false);
    EXPECT_LT(relative_error(got.y, wanted.y), 1e-6);
    for (size_t i = 0; i < wanted.gradients.size(); ++i) {
      EXPECT_LT(relative_error(got.gradients[i], wanted.gradients[i]), 1e-5);
    }
    // Half precision has no copies.
    EXPECT_TRUE(same(run_layer(layer, true).y, run_layer(layer, true).y));
  }
}

TEST(Linear, BiasGradient) {
  torch::manual_seed(2);
  const auto options = on_device();
  const std::vector<std::pair<int64_t, int64_t>> shapes = {
      {5000, 264}, {5000, 20}, {1024, 768}, {61, 2056}, {3, 7}, {1, 8}};
  for (const auto& [rows, columns] : shapes) {
    const Tensor x = torch::randn({rows, 16}, options);
    const Tensor weight = torch::randn({columns, 16}, options).requires_grad_();
    const Tensor bias = torch::randn({columns}, options).requires_grad_();
    const WeightCopies copies({weight, bias}, torch::kBFloat16);
    const compat::AutocastGuard autocast(half());
    Tensor wanted = torch::zeros({columns}, options.dtype(torch::kDouble));
    for (int i = 0; i < 2; ++i) {  // the second gradient is added to the first
      const Tensor y = ops::linear(x, weight, bias);
      const Tensor dy = torch::randn_like(y);
      y.backward(dy);
      wanted += dy.to(torch::kDouble).sum(0);
    }
    EXPECT_LT(relative_error(wanted, bias.grad().to(torch::kDouble)), 1e-5)
        << rows << " × " << columns;
  }
}

TEST(Linear, AddsResidual) {
  torch::manual_seed(3);
  const auto options = on_device();
  // The last one is large enough for a product that adds by itself.
  for (const int64_t width : {24, device().is_cuda() ? 768 : 40}) {
    for (const auto layout :
         {ops::WeightLayout::kOutIn, ops::WeightLayout::kInOut}) {
      const Tensor x = torch::randn({2, 512, width}, options).requires_grad_();
      const Tensor weight =
          torch::randn({width, width}, options).div_(8).requires_grad_();
      const Tensor bias = torch::randn({width}, options).requires_grad_();
      const Tensor residual = torch::randn_like(x).requires_grad_();
      const Tensor dy = torch::randn_like(x);
      const auto run = [&](bool fused) {
        const compat::AutocastGuard autocast(half());
        const Tensor y = fused
                             ? ops::linear(x, weight, bias, layout, residual)
                             : residual + ops::linear(x, weight, bias, layout);
        y.backward(dy);
        return LinearOutcome{y.detach(),
                             take_gradients({x, weight, bias, residual})};
      };
      const LinearOutcome plain = run(false);
      EXPECT_TRUE(same(run(true).y, plain.y));
      const WeightCopies copies({weight, bias}, torch::kBFloat16);
      const LinearOutcome wanted = run(false), got = run(true);
      EXPECT_EQ(got.y.scalar_type(), torch::kFloat);
      EXPECT_LT(relative_error(got.y, wanted.y), 5e-3);
      for (size_t i = 0; i < wanted.gradients.size(); ++i) {
        EXPECT_LT(relative_error(got.gradients[i], wanted.gradients[i]), 1e-5)
            << i;
      }
      EXPECT_TRUE(same(got.gradients[3], dy));
    }
  }
}

TEST(Linear, SavesOnlyInput) {
  const Layer layer = make_layer(ops::WeightLayout::kOutIn);
  const WeightCopies copies({layer.weight}, torch::kBFloat16);
  KeptMeter kept({layer.weight, layer.bias});
  Tensor y;
  {
    const KeptMeter::Scope scope(kept, 0);
    const compat::AutocastGuard guard(half());
    y = ops::linear(layer.x, layer.weight, layer.bias);
  }
  EXPECT_EQ(kept.live_bytes(), allocated_bytes(3 * 7 * 40 * 2, device()));
}

TEST(Linear, InPlaceOperatorsAndCheckpoints) {
  const Layer layer = make_layer(ops::WeightLayout::kOutIn);
  const WeightCopies copies({layer.weight}, torch::kBFloat16);
  const auto block = [&](const Tensor& x) {
    return ops::linear(x, layer.weight, layer.bias).relu_();
  };
  const auto run_block = [&](bool again) {
    Tensor y;
    {
      const compat::AutocastGuard guard(half());
      y = again ? checkpoint(block, layer.x) : block(layer.x);
    }
    y.to(torch::kFloat).square().sum().backward();
    return take_gradients({layer.x, layer.weight, layer.bias});
  };
  const Tensors wanted = run_block(false);
  const Tensors got = run_block(true);
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_TRUE(same(got[i], wanted[i])) << i;
  }
}

/// Ends a run before the output of an operator is computed.
class EndBeforeOutput final : public compat::SavedTensorPolicy {
 public:
  struct Ended {
    std::vector<int64_t> sizes;  // of the tensors to be saved
  };
  std::unique_ptr<compat::SavedTensorHooks> make_hooks() override {
    return nullptr;
  }
  void before_output(const std::vector<Tensor>& to_save) override {
    Ended ended;
    for (const auto& tensor : to_save) ended.sizes.push_back(tensor.numel());
    throw ended;
  }
};

/// A recomputation that needs the input of the last layer only does not multiply.
TEST(Linear, RecomputationEndsBeforeTheProduct) {
  const Layer layer = make_layer(ops::WeightLayout::kOutIn);
  const WeightCopies copies({layer.weight}, torch::kBFloat16);
  const compat::AutocastGuard guard(half());
  const compat::SavedTensorScope scope(std::make_shared<EndBeforeOutput>());
  try {
    ops::linear(layer.x, layer.weight, layer.bias);
    FAIL() << "the product was computed";
  } catch (const EndBeforeOutput::Ended& ended) {
    EXPECT_EQ(ended.sizes, std::vector<int64_t>{layer.x.numel()});
  }
}

TEST(Linear, OutputThatNothingReads) {
  for (const bool residual : {false, true}) {
    const Layer layer = make_layer(ops::WeightLayout::kOutIn);
    const WeightCopies copies({layer.weight}, torch::kBFloat16);
    const auto added =
        residual ? torch::randn({3, 7, 24}, on_device()) : Tensor();
    const auto run = [&](bool needed) {
      const compat::AutocastGuard guard(half());
      return ops::linear(layer.x, layer.weight, layer.bias, layer.layout, added,
                         needed);
    };
    const auto gradients = [&](const Tensor& y) {
      y.backward(torch::ones_like(y));
      return take_gradients({layer.x, layer.weight, layer.bias});
    };
    const Tensor y = run(true), unused = run(false);
    EXPECT_EQ(unused.sizes(), y.sizes());
    EXPECT_EQ(unused.strides(), y.strides());
    EXPECT_EQ(unused.scalar_type(), y.scalar_type());
    const Tensors wanted = gradients(y), got = gradients(unused);
    for (size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_TRUE(same(got[i], wanted[i])) << i;
    }
  }
}

/// Whether packed_linear() computed one matrix product.
bool fused(const std::vector<Tensor>& outputs) {
  return outputs[0].is_alias_of(outputs[1]);
}

TEST(Linear, QkvMatchesThreeLayers) {
  torch::manual_seed(4);
  const auto options = on_device(torch::kFloat);
  const Tensor x = torch::randn({2, 9, 32}, options).requires_grad_();
  std::vector<Tensor> weights(3), biases(3);
  for (size_t i = 0; i < 3; ++i) {
    weights[i] = torch::randn({128, 32}, options).mul_(0.2).requires_grad_();
    biases[i] = torch::randn({128}, options).requires_grad_();
  }
  const Tensors parameters = {x,         weights[0], weights[1], weights[2],
                              biases[0], biases[1],  biases[2]};
  const Tensors copied(parameters.begin() + 1, parameters.end());
  const auto run_three = [&](bool joined, bool autocast) {
    Tensor y;
    for (int i = 0; i < 2; ++i) {
      {
        const compat::AutocastGuard guard(autocast ? half()
                                                   : compat::AutocastState{});
        if (joined) {
          const auto outputs = ops::packed_linear(x * (1 + i), weights, biases);
          TORCH_CHECK(fused(outputs));
          y = torch::cat({outputs[0], outputs[1], outputs[2]}, -1);
          TORCH_CHECK(
              same(ops::joined_linear(x * (1 + i), weights, biases).detach(),
                   y.detach()));
        } else {
          std::vector<Tensor> parts;
          for (size_t k = 0; k < 3; ++k) {
            parts.push_back(ops::linear(x * (1 + i), weights[k], biases[k]));
          }
          y = torch::cat(parts, -1);
        }
      }
      (y.to(torch::kFloat).sin().sum() / 3).backward();
    }
    return LinearOutcome{y.detach(), take_gradients(parameters)};
  };
  const Tensors before = {weights[0].detach().clone(),
                          biases[2].detach().clone()};
  for (const auto type : {torch::kFloat, torch::kBFloat16}) {
    const bool autocast = type == torch::kBFloat16;
    const WeightCopies copies(copied, type);
    const LinearOutcome wanted = run_three(false, autocast);
    if (type == torch::kFloat) {
      // Not fused before the parameters are packed.
      EXPECT_FALSE(fused(ops::packed_linear(x, weights, biases)));
      ops::pack_contiguous({weights[0], weights[1], weights[2]});
      EXPECT_FALSE(fused(ops::packed_linear(x, weights, biases)));
      ops::pack_contiguous({biases[0], biases[1], biases[2]});
      EXPECT_TRUE(same(weights[0].detach(), before[0]));
      EXPECT_TRUE(same(biases[2].detach(), before[1]));
      continue;  // the copies are those of the unpacked weights
    }
    const LinearOutcome got = run_three(true, autocast);
    EXPECT_LT(relative_error(got.y, wanted.y), 1e-2);
    const double rounding =
        std::max(1e-2, 2 * testing::half_gemm_error(3 * 128));
    for (size_t i = 0; i < parameters.size(); ++i) {
      ASSERT_TRUE(got.gradients[i].defined()) << i;
      EXPECT_EQ(got.gradients[i].sizes(), parameters[i].sizes());
      EXPECT_LT(relative_error(got.gradients[i], wanted.gradients[i]), rounding)
          << i;
    }
  }
  const WeightCopies copies(copied, torch::kFloat);
  const LinearOutcome wanted = run_three(false, false);
  const LinearOutcome got = run_three(true, false);
  for (size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_LT(relative_error(got.gradients[i], wanted.gradients[i]), 1e-5) << i;
  }
  // Existing gradients that are not packed are added to one by one.
  for (const Tensor& parameter : copied) {
    Tensor(parameter).mutable_grad() = torch::ones_like(parameter.detach());
  }
  const LinearOutcome apart = run_three(true, false);
  for (size_t i = 1; i < 7; ++i) {
    EXPECT_LT(relative_error(apart.gradients[i] - 1, wanted.gradients[i]),
              1e-5);
  }
}

TEST(Linear, QkvWithConversionPerUse) {
  torch::manual_seed(6);
  const auto options = on_device(torch::kFloat);
  const Tensor x = torch::randn({2, 9, 32}, options);
  std::vector<Tensor> weights(3), biases(3);
  for (size_t i = 0; i < 3; ++i) {
    weights[i] = torch::randn({128, 32}, options).requires_grad_();
    biases[i] = torch::randn({128}, options).requires_grad_();
  }
  ops::pack_contiguous({weights[0], weights[1], weights[2]});
  ops::pack_contiguous({biases[0], biases[1], biases[2]});
  const Tensors all = {weights[0], weights[1], weights[2],
                       biases[0],  biases[1],  biases[2]};
  const auto now = [&] {
    const compat::AutocastGuard guard(half());
    return ops::packed_linear(x, weights, biases);
  };
  std::vector<Tensor> wanted;
  {
    const WeightCopies copies(all, torch::kBFloat16);
    wanted = now();
  }
  WeightCopiesOptions each;
  each.convert_per_use = true;
  WeightCopies copies(all, torch::kBFloat16, each);
  EXPECT_TRUE(fused(now()));
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(same(now()[i], wanted[i]));
  // Not fused outside of autocast, which selects another type, nor with outdated copies.
  EXPECT_FALSE(fused(ops::packed_linear(x, weights, biases)));
  EXPECT_FALSE(ops::joined_linear(x, weights, biases).defined());
  copies.expire();
  EXPECT_FALSE(fused(now()));
}

TEST(Linear, PackedLayersOfDifferentSizesWithoutBias) {
  torch::manual_seed(7);
  const auto options = on_device(torch::kFloat);
  const Tensor x = torch::randn({2, 9, 32}, options).requires_grad_();
  for (const size_t count : {2, 3}) {
    // Half-precision copies of multiples of 128 rows are adjacent.
    const std::vector<int64_t> rows = {256, 128, 384};
    std::vector<Tensor> weights;
    for (size_t i = 0; i < count; ++i) {
      weights.push_back(
          torch::randn({rows[i], 32}, options).mul_(0.2).requires_grad_());
    }
    ops::pack_contiguous(weights);
    Tensors parameters = {x};
    parameters.insert(parameters.end(), weights.begin(), weights.end());
    const auto run = [&](bool expect_fused) {
      for (int i = 0; i < 2; ++i) {
        const auto outputs = ops::packed_linear(x * (1 + i), weights);
        EXPECT_EQ(fused(outputs), expect_fused);
        Tensor sum = torch::zeros({}, options);
        for (size_t k = 0; k < count; ++k) {
          EXPECT_EQ(outputs[k].sizes(), (std::vector<int64_t>{2, 9, rows[k]}));
          sum = sum + outputs[k].sin().sum() * static_cast<double>(k + 1);
        }
        (sum / 3).backward();
      }
      return take_gradients(parameters);
    };
    const auto wanted = run(false);
    const WeightCopies copies(weights, torch::kFloat);
    const auto got = run(true);
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_LT(relative_error(got[i], wanted[i]), 1e-5) << count << " " << i;
    }
  }
}

TEST(Linear, PackedRejectsOtherNumbersOfLayers) {
  const Tensor x = torch::randn({2, 4}, on_device());
  const Tensor weight = torch::randn({3, 4}, on_device());
  const auto error = [&](const Tensors& weights, const Tensors& biases) {
    return testing::error_of([&] { ops::packed_linear(x, weights, biases); });
  };
  EXPECT_NE(error({weight}, {}).find("expected 2 or 3 weights, got 1"),
            std::string::npos);
  EXPECT_NE(error({weight, weight}, {weight.select(1, 0)})
                .find("one per weight, got 1 for 2"),
            std::string::npos);
}

}  // namespace
}  // namespace reprise
