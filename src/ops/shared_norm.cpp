#include "compat/autocast.h"

#include <reprise/ops/shared_norm.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <cmath>
#include <mutex>
#include <optional>
#include <utility>

namespace reprise {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct NormScope {
  std::shared_ptr<NormPeers> peers;
  bool counts = true;
};

std::mutex& scope_mutex() {
  static std::mutex mutex;
  return mutex;
}

std::optional<NormScope>& open_scope() {
  static std::optional<NormScope> scope;
  return scope;
}

/// For the backward, which may come after the scope.
struct NormScopeHolder : torch::CustomClassHolder {
  NormScope scope;
};

Tensor gather(const NormScope& scope, const Tensor& own) {
  return scope.peers ? scope.peers->gather(own) : own.unsqueeze(0);
}

std::vector<int64_t> all_but_channels(const Tensor& x) {
  std::vector<int64_t> dims = {0};
  for (int64_t i = 2; i < x.dim(); ++i) dims.push_back(i);
  return dims;
}

/// (C) to be used with `x`.
Tensor by_channel(const Tensor& values, const Tensor& x) {
  std::vector<int64_t> sizes(static_cast<size_t>(x.dim()), 1);
  sizes[1] = values.numel();
  return values.view(sizes);
}

/// In which statistics of `x` are taken.
torch::ScalarType wide_type(const Tensor& x) {
  return c10::promoteTypes(x.scalar_type(), torch::kFloat);
}

Tensor on_host(const Tensor& values) {
  return values.to(torch::kDouble).cpu();
}

struct Statistics {
  Tensor mean, variance;  // (C), double precision, on the host
  double count = 0;       // values a channel
};

Statistics statistics_of(const Tensor& x, const NormScope& scope) {
  const int64_t channels = x.size(1);
  Tensor own = torch::zeros({2 * channels + 1}, torch::kDouble);
  if (scope.counts) {
    const auto [variance, mean] = torch::var_mean(
        x.to(wide_type(x)), all_but_channels(x), /*unbiased=*/false,
        /*keepdim=*/false);
    own[0] = static_cast<double>(x.numel() / channels);
    own.narrow(0, 1, channels).copy_(on_host(mean));
    own.narrow(0, 1 + channels, channels).copy_(on_host(variance));
  }
  const Tensor all = gather(scope, own);
  const Tensor counts = all.narrow(1, 0, 1);
  const Tensor means = all.narrow(1, 1, channels);
  const Tensor variances = all.narrow(1, 1 + channels, channels);
  Statistics result;
  result.count = counts.sum().item<double>();
  TORCH_CHECK(result.count > 1,
              "[shared_batch_norm] expected more than one value a channel over "
              "all peers, got ",
              result.count);
  result.mean = (counts * means).sum(0) / result.count;
  const Tensor apart = means - result.mean;
  result.variance =
      (counts * (variances + apart * apart)).sum(0) / result.count;
  return result;
}

void move_running(const NormState& norm, const Statistics& now) {
  Tensor(norm.num_batches_tracked).add_(1);
  const double momentum = norm.momentum
                              ? *norm.momentum
                              : 1.0 / norm.num_batches_tracked.item<double>();
  const auto move = [&](Tensor running, const Tensor& value) {
    running.mul_(1 - momentum).add_(value.to(running.options()), momentum);
  };
  move(norm.running_mean, now.mean);
  move(norm.running_var, now.variance * (now.count / (now.count - 1)));
}

class SharedNormOperator
    : public torch::autograd::Function<SharedNormOperator> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x,
                        const Tensor& weight, const Tensor& bias,
                        const Tensor& mean, const Tensor& variance, double eps,
                        double count, const NormScope& scope) {
    const compat::AutocastGuard none(compat::AutocastState{});
    context->save_for_backward({x, weight, mean, torch::rsqrt(variance + eps)});
    auto holder = c10::make_intrusive<NormScopeHolder>();
    holder->scope = scope;
    context->saved_data["scope"] = c10::IValue::make_capsule(holder);
    context->saved_data["count"] = count;
    return torch::batch_norm(x, weight, bias, mean.to(wide_type(x)),
                             variance.to(wide_type(x)), /*training=*/false,
                             /*momentum=*/0, eps, /*cudnn_enabled=*/true);
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    TORCH_CHECK(!torch::GradMode::is_enabled(),
                "[shared_batch_norm] has no second derivative");
    const compat::AutocastGuard none(compat::AutocastState{});
    const variable_list saved = context->get_saved_variables();
    const Tensor& x = saved[0];
    const Tensor& weight = saved[1];
    const NormScope scope = c10::static_intrusive_pointer_cast<NormScopeHolder>(
                                context->saved_data["scope"].toCapsule())
                                ->scope;
    const double count = context->saved_data["count"].toDouble();
    const auto type = wide_type(x);
    const auto dims = all_but_channels(x);
    const int64_t channels = x.size(1);

    // x̂ = (x − mean) / σ; dx = w/σ (dy − Σdy/n − x̂ Σ(dy x̂)/n), sums over all peers.
    const Tensor inverse = saved[3].to(type);
    const Tensor dy = gradients[0].to(type);
    Tensor hat = x.to(type, /*non_blocking=*/false, /*copy=*/true);
    hat.sub_(by_channel(saved[2].to(type), x));
    hat.mul_(by_channel(inverse, x));
    const Tensor sum = dy.sum(dims);
    const Tensor sum_hat = (dy * hat).sum(dims);
    Tensor own = torch::zeros({2 * channels}, torch::kDouble);
    if (scope.counts) {
      own.narrow(0, 0, channels).copy_(on_host(sum));
      own.narrow(0, channels, channels).copy_(on_host(sum_hat));
    }
    const Tensor means = (gather(scope, own).sum(0) / count).to(dy.options());
    Tensor dx;
    if (context->needs_input_grad(0)) {
      if (scope.counts) {
        hat.mul_(by_channel(-means.narrow(0, channels, channels), x));
        hat.add_(dy).sub_(by_channel(means.narrow(0, 0, channels), x));
        hat.mul_(by_channel(inverse * weight, x));
      } else {
        hat.zero_();
      }
      dx = hat.to(x.scalar_type());
    }
    return {dx, sum_hat, sum, {}, {}, {}, {}, {}};
  }
};

}  // namespace

bool shares_norms() {
  const std::lock_guard lock(scope_mutex());
  return open_scope().has_value();
}

SharedNormScope::SharedNormScope(std::shared_ptr<NormPeers> peers,
                                 bool counts) {
  const std::lock_guard lock(scope_mutex());
  TORCH_CHECK(!open_scope(), "[SharedNormScope] another one is open already");
  open_scope() = NormScope{std::move(peers), counts};
}

SharedNormScope::~SharedNormScope() {
  const std::lock_guard lock(scope_mutex());
  open_scope().reset();
}

Tensor shared_batch_norm(const NormState& norm, const Tensor& x) {
  std::optional<NormScope> scope;
  {
    const std::lock_guard lock(scope_mutex());
    scope = open_scope();
  }
  if (!scope) return {};
  TORCH_CHECK(norm.weight.defined() && norm.bias.defined() && x.dim() >= 2 &&
                  x.size(1) == norm.weight.numel(),
              "[shared_batch_norm] expected (N, C, …) and a weight and a bias "
              "of C, got ",
              x.sizes());
  Statistics found;
  {
    const torch::NoGradGuard no_grad;
    const compat::AutocastGuard none(compat::AutocastState{});
    found = statistics_of(x.detach(), *scope);
    if (norm.running_mean.defined()) move_running(norm, found);
  }
  const auto here = x.options().dtype(torch::kDouble).requires_grad(false);
  return SharedNormOperator::apply(x, norm.weight, norm.bias,
                                   found.mean.to(here), found.variance.to(here),
                                   norm.eps, found.count, *scope);
}

}  // namespace reprise
