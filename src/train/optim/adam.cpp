// Tested by tests/train/optim/optimizer_test.cpp.
#include "compat/fused_optimizer.h"
#include "ops/adam_update.h"
#include "train/optim/list_optimizer.h"
#include "train/optim/registry.h"

#include <cmath>
#include <map>

namespace reprise {
namespace {

/// torch.optim.Adam and AdamW (Kingma and Ba 2014; Loshchilov and Hutter 2017).
class Adam final : public ListOptimizer {
 public:
  Adam(const OptimizerOptions& options, const NamedTensors& parameters,
       bool decoupled)
      : ListOptimizer(parameters, {"exp_avg", "exp_avg_sq"}),
        options_(options),
        decoupled_(decoupled) {}

 protected:
  void update(const List& list, double lr) override {
    const auto& [p, gradients, counts, state, none, values] = list;
    const double beta1 = options_.beta1;
    const double beta2 = options_.beta2;
    const double decay = options_.weight_decay;
    Tensors g = gradients;
    if (decay > 0 && decoupled_) at::_foreach_mul_(p, 1 - lr * decay);
    if (decay > 0 && !decoupled_) g = at::_foreach_add(gradients, p, decay);

    at::_foreach_mul_(state[0], beta1);
    at::_foreach_add_(state[0], g, 1 - beta1);
    at::_foreach_mul_(state[1], beta2);
    at::_foreach_addcmul_(state[1], g, g, 1 - beta2);
    g.clear();

    // Bias corrections, because the averages start at 0.
    std::vector<at::Scalar> rates;
    std::vector<at::Scalar> roots;
    for (const int64_t count : counts) {
      rates.emplace_back(-lr / (1 - std::pow(beta1, count)));
      roots.emplace_back(std::sqrt(1 - std::pow(beta2, count)));
    }
    const auto divisors = at::_foreach_sqrt(state[1]);
    at::_foreach_div_(divisors, roots);
    at::_foreach_add_(divisors, options_.eps);
    at::_foreach_addcdiv_(p, state[0], divisors, rates);
  }

  bool has_fused(torch::Device device) const override {
    return compat::has_fused_adam(device);
  }

  void update_fused(const List& list, double lr) override {
    std::vector<detail::AdamParameter> ours;
    List others;
    others.state.resize(2);
    for (size_t i = 0; i < list.parameters.size(); ++i) {
      detail::AdamParameter entry{list.parameters[i], list.gradients[i],
                                  list.state[0][i], list.state[1][i],
                                  list.counts[i]};
      if (!list.step_values.empty()) entry.step_values = list.step_values[i];
      if (detail::adam_update_eligible(entry)) {
        ours.push_back(entry);
        continue;
      }
      others.parameters.push_back(entry.parameter);
      others.gradients.push_back(entry.gradient);
      others.counts.push_back(entry.count);
      others.state[0].push_back(entry.mean);
      others.state[1].push_back(entry.square);
    }
    TORCH_INTERNAL_ASSERT(list.step_values.empty() ||
                          others.parameters.empty());
    if (!others.parameters.empty()) update_by_library(others, lr);
    if (!ours.empty()) detail::adam_update(ours, settings(lr));
  }

  StepValues step_values(double lr, int64_t count) const override {
    return detail::adam_step_values(settings(lr), count);
  }

  bool reads_step_values(const torch::Tensor& parameter,
                         const Tensors& state) const override {
    // State that does not exist yet will be like the parameter.
    const auto& mean = state[0].defined() ? state[0] : parameter;
    const auto& square = state[1].defined() ? state[1] : parameter;
    return detail::adam_update_eligible({parameter, parameter, mean, square});
  }

  bool updates_split(const torch::Tensor& parameter,
                     const Tensors& state) const override {
    return reads_step_values(parameter, state);
  }

  bool elementwise() const override { return true; }

  Temporaries temporaries() const override { return Temporaries::kList; }

 private:
  detail::AdamSettings settings(double lr) const {
    return {lr,           options_.beta1,        options_.beta2,
            options_.eps, options_.weight_decay, decoupled_};
  }

  void update_by_library(const List& list, double lr) const {
    // Fill on the device, without a copy or synchronization.
    std::map<int64_t, torch::Tensor> by_count;
    Tensors steps;
    for (const int64_t count : list.counts) {
      auto& step = by_count[count];
      if (!step.defined()) {
        step = torch::full({}, double(count),
                           list.parameters[0].options().dtype(torch::kFloat));
      }
      steps.push_back(step);
    }
    compat::fused_adam_(list.parameters, list.gradients, list.state[0],
                        list.state[1], steps,
                        {lr, options_.beta1, options_.beta2, options_.eps,
                         options_.weight_decay, decoupled_});
  }

  const OptimizerOptions options_;
  const bool decoupled_;
};

template <bool kDecoupled>
detail::OptimizerInfo make_adam_info(const char* name) {
  detail::OptimizerInfo info;
  info.name = name;
  info.make = [](const OptimizerOptions& options,
                 const NamedTensors& parameters) -> std::unique_ptr<Optimizer> {
    return std::make_unique<Adam>(options, parameters, kDecoupled);
  };
  info.has_betas = true;
  info.elementwise_state = [](const OptimizerOptions&) {
    return std::vector<std::string>{"exp_avg.", "exp_avg_sq."};
  };
  return info;
}

}  // namespace

namespace detail {

std::vector<OptimizerInfo> adam_optimizers() {
  return {make_adam_info<false>("adam"), make_adam_info<true>("adamw")};
}

}  // namespace detail
}  // namespace reprise
