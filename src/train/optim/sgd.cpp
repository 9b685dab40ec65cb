// Tested by tests/train/optim/optimizer_test.cpp.
#include "compat/fused_optimizer.h"
#include "train/optim/list_optimizer.h"
#include "train/optim/registry.h"

namespace reprise {
namespace {

/// torch.optim.SGD without dampening. With g = gradient + decay × p and
/// m = momentum × m + g, the update is p -= lr × m, or with Nesterov momentum
/// p -= lr × (g + momentum × m). It needs no temporaries.
class Sgd final : public ListOptimizer {
 public:
  Sgd(const OptimizerOptions& options, const NamedTensors& parameters)
      : ListOptimizer(parameters, options.momentum > 0
                                      ? std::vector<std::string>{"momentum"}
                                      : std::vector<std::string>{}),
        options_(options) {}

 protected:
  void update(const List& list, double lr) override {
    const auto& [p, g, counts, state, none, values] = list;
    const double momentum = options_.momentum;
    const double decay = options_.weight_decay;
    if (momentum > 0) {
      at::_foreach_mul_(state[0], momentum);
      at::_foreach_add_(state[0], g);
      if (decay > 0) at::_foreach_add_(state[0], p, decay);
    }
    if (momentum > 0 && !options_.nesterov) {
      at::_foreach_add_(p, state[0], -lr);
      return;
    }
    if (decay > 0) at::_foreach_mul_(p, 1 - lr * decay);
    at::_foreach_add_(p, g, -lr);
    if (momentum > 0) at::_foreach_add_(p, state[0], -lr * momentum);
  }

  bool has_fused(torch::Device device) const override {
    return compat::has_fused_sgd(device);
  }

  void update_fused(const List& list, double lr) override {
    const auto momentums =
        list.state.empty() ? at::TensorList() : at::TensorList(list.state[0]);
    compat::fused_sgd_(
        list.parameters, list.gradients, momentums,
        {lr, options_.momentum, options_.weight_decay, options_.nesterov});
  }

  bool elementwise() const override { return true; }

  Temporaries temporaries() const override { return Temporaries::kNone; }

 private:
  const OptimizerOptions options_;
};

}  // namespace

namespace detail {

std::vector<OptimizerInfo> sgd_optimizers() {
  OptimizerInfo info;
  info.name = "sgd";
  info.make = [](const OptimizerOptions& options,
                 const NamedTensors& parameters) -> std::unique_ptr<Optimizer> {
    return std::make_unique<Sgd>(options, parameters);
  };
  info.has_momentum = true;
  info.elementwise_state = [](const OptimizerOptions& options) {
    return options.momentum > 0 ? std::vector<std::string>{"momentum."}
                                : std::vector<std::string>{};
  };
  return {info};
}

}  // namespace detail
}  // namespace reprise
