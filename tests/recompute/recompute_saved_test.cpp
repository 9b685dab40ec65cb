#include "compat/autocast.h"
#include "support.h"

#include <reprise/memory/kept.h>
#include <reprise/memory/meter.h>
#include <reprise/recompute/checkpoint.h>

namespace reprise {
namespace {

using testing::device;
using testing::on_device;
using testing::same;
using testing::take_gradients;
using torch::Tensor;

struct Layer {
  Tensor x, weight;
  int runs = 0;  // of the cheap function

  Layer() {
    torch::manual_seed(4);
    x = torch::randn({6, 40}, on_device()).requires_grad_();
    weight = torch::randn({40, 24}, on_device()).requires_grad_();
  }

  /// y = exp(x) weight, where exp(x) need not be saved.
  Tensor run(bool again, bool through_view = false) {
    const Tensor value = x.exp();
    std::optional<RecomputeSaved> scope;
    if (again) {
      scope.emplace(value.detach(), Tensors{x}, [this](const Tensors& in) {
        ++runs;
        return in[0].exp();
      });
    }
    return torch::mm(
        through_view ? value.view({3, 2, 40}).view({6, 40}) : value, weight);
  }

  Tensors gradients(const Tensor& y) {
    y.square().sum().backward();
    return take_gradients({x, weight});
  }
};

TEST(RecomputeSaved, GradientsAreTheSame) {
  Layer layer;
  const Tensors wanted = layer.gradients(layer.run(false));
  for (const bool view : {false, true}) {
    layer.runs = 0;
    const Tensors got = layer.gradients(layer.run(true, view));
    EXPECT_EQ(layer.runs, 1);
    for (size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_TRUE(same(got[i], wanted[i])) << i;
    }
  }
}

/// The product saves its input, unless that is recomputed.
TEST(RecomputeSaved, KeepsTheInputsInstead) {
  Layer layer;
  const auto kept_bytes = [&](bool again) {
    KeptMeter kept({layer.weight, layer.x});
    const Tensor value = layer.x * 2;  // saves nothing
    const KeptMeter::Scope scope(kept, 0);
    std::optional<RecomputeSaved> saved;
    if (again) {
      saved.emplace(value.detach(), Tensors{layer.x},
                    [](const Tensors& in) { return in[0] * 2; });
    }
    const Tensor y = torch::mm(value, layer.weight);
    return kept.live_bytes();
  };
  EXPECT_EQ(kept_bytes(false), allocated_bytes(6 * 40 * 4, device()));
  EXPECT_EQ(kept_bytes(true), 0);
}

TEST(RecomputeSaved, WorksInsideCheckpoints) {
  Layer layer;
  const Tensors wanted = layer.gradients(layer.run(false));
  const Tensor y = checkpoint(
      [&](const Tensor& x) {
        const Tensor value = x.exp();
        const RecomputeSaved scope(
            value.detach(), {x}, [](const Tensors& in) { return in[0].exp(); });
        return torch::mm(value, layer.weight);
      },
      layer.x);
  const Tensors got = layer.gradients(y);
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_TRUE(same(got[i], wanted[i])) << i;
  }
}

/// What has another type or size is saved as usual.
TEST(RecomputeSaved, SavesOtherTensors) {
  Layer layer;
  const auto run = [&](bool again) {
    const Tensor value = layer.x.exp();
    std::optional<RecomputeSaved> scope;
    if (again) {
      scope.emplace(value.detach(), Tensors{layer.x}, [&](const Tensors& in) {
        ++layer.runs;
        return in[0].exp();
      });
    }
    return torch::mm(value.narrow(0, 0, 3), layer.weight);
  };
  const Tensors wanted = layer.gradients(run(false));
  const Tensors got = layer.gradients(run(true));
  EXPECT_EQ(layer.runs, 0);
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_TRUE(same(got[i], wanted[i])) << i;
  }
}

TEST(RecomputeSaved, RunsWithTheAutocastModeOfTheForward) {
  Layer layer;
  compat::AutocastState half;
  (device().is_cuda() ? half.cuda_enabled : half.cpu_enabled) = true;
  half.cuda_dtype = half.cpu_dtype = torch::kBFloat16;
  bool as_in_forward = false;
  Tensor y;
  {
    const compat::AutocastGuard guard(half);
    const Tensor value = layer.x.to(torch::kBFloat16);
    const RecomputeSaved scope(
        value.detach(), {layer.x}, [&](const Tensors& in) {
          as_in_forward = compat::AutocastState::current() == half;
          EXPECT_FALSE(torch::GradMode::is_enabled());
          return in[0].to(torch::kBFloat16);
        });
    y = torch::mm(value, layer.weight);
  }
  layer.gradients(y.to(torch::kFloat));
  EXPECT_TRUE(as_in_forward);
}

TEST(RecomputeSaved, RejectsValuesThatAreNotContiguous) {
  const Tensor value = torch::ones({2, 3}, on_device()).t();
  EXPECT_THROW(RecomputeSaved(value, {}, {}), c10::Error);
}

TEST(RecomputeSaved, RejectsAnotherValue) {
  Layer layer;
  const Tensor value = layer.x.exp();
  Tensor y;
  {
    const RecomputeSaved scope(value.detach(), {layer.x},
                               [](const Tensors& in) { return in[0].sum(0); });
    y = torch::mm(value, layer.weight);
  }
  const std::string text = testing::error_of([&] { layer.gradients(y); });
  EXPECT_NE(text.find("return the value again"), std::string::npos) << text;
}

}  // namespace
}  // namespace reprise
