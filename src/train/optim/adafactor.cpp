// Tested by tests/train/optim/optimizer_test.cpp.
#include "train/optim/list_optimizer.h"
#include "train/optim/registry.h"

#include <cmath>

namespace reprise {
namespace {

/// Adafactor (Shazeer and Stern 2018), equal to the Hugging Face implementation
/// without relative steps, parameter scaling and first moments.
///
/// Adam's average of squared gradients is as large as the parameter. Adafactor
/// approximates the average of an (…, R, C) tensor by the outer product of its
/// row means (…, R) and its column means (…, C), divided by the total mean.
class Adafactor final : public ListOptimizer {
 public:
  Adafactor(const OptimizerOptions& options, const NamedTensors& parameters)
      : ListOptimizer(parameters, {"row", "col", "square"}),
        decay_(options.weight_decay) {}

 protected:
  enum Kind : size_t { kRow, kCol, kSquare };

  std::optional<std::vector<int64_t>> shape_of(
      size_t kind, const torch::Tensor& parameter) const override {
    auto shape = parameter.sizes().vec();
    if ((parameter.dim() >= 2) == (kind == kSquare)) return std::nullopt;
    if (kind == kRow) shape.erase(shape.end() - 1);
    if (kind == kCol) shape.erase(shape.end() - 2);
    return shape;
  }

  void update(const List& list, double lr) override {
    // There are no foreach operators for means over rows and columns, so update
    // each tensor separately. Temporaries are then as large as one tensor.
    for (size_t i = 0; i < list.parameters.size(); ++i) {
      const auto& gradient = list.gradients[i];
      const double keep = 1 - std::pow(double(list.counts[i]), kDecayRate);
      auto change = list.parameters[i].dim() >= 2
                        ? factored(gradient, list.state[kRow][i],
                                   list.state[kCol][i], keep)
                        : whole(gradient, list.state[kSquare][i], keep);
      change.mul_(gradient);
      // Clip to a root mean square of kClip, on the device without
      // synchronization.
      const auto rms = change.norm() / std::sqrt(double(change.numel()));
      change.div_((rms / kClip).clamp_min_(1.0));
      if (decay_ > 0) list.parameters[i].mul_(1 - decay_ * lr);
      list.parameters[i].add_(change, -lr);
    }
  }

  Temporaries temporaries() const override { return Temporaries::kLargest; }

 private:
  static constexpr double kDecayRate = -0.8;
  static constexpr double kEps = 1e-30;
  static constexpr double kClip = 1.0;

  /// Adds `gradient` to the average of squares and returns 1 / √ of the
  /// average.
  static torch::Tensor factored(const torch::Tensor& gradient,
                                torch::Tensor row, torch::Tensor col,
                                double keep) {
    {
      // Take both means over the last dimension. Over any other, the CUDA
      // kernel needs a temporary of twice the size of the tensor.
      auto square = torch::empty(gradient.sizes(), gradient.options());
      torch::square_out(square, gradient).add_(kEps);
      row.mul_(keep).add_(square.mean(-1), 1 - keep);
      const auto turned = gradient.transpose(-1, -2);
      square = square.view(turned.sizes());
      torch::square_out(square, turned).add_(kEps);
      col.mul_(keep).add_(square.mean(-1), 1 - keep);
    }
    const auto row_factor = (row / row.mean(-1, /*keepdim=*/true)).rsqrt_();
    return row_factor.unsqueeze(-1) * col.rsqrt().unsqueeze(-2);
  }

  static torch::Tensor whole(const torch::Tensor& gradient,
                             torch::Tensor square, double keep) {
    square.mul_(keep).add_(gradient.square().add_(kEps), 1 - keep);
    return square.rsqrt();
  }

  const double decay_;
};

}  // namespace

namespace detail {

std::vector<OptimizerInfo> adafactor_optimizers() {
  OptimizerInfo info;
  info.name = "adafactor";
  info.make = [](const OptimizerOptions& options,
                 const NamedTensors& parameters) -> std::unique_ptr<Optimizer> {
    return std::make_unique<Adafactor>(options, parameters);
  };
  return {info};
}

}  // namespace detail
}  // namespace reprise
