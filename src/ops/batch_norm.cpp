#include "compat/autocast.h"
#include "ops/function.h"

#include <reprise/ops/batch_norm.h>

#include <ATen/Context.h>
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

struct OpenScope {
  std::shared_ptr<BatchNormPeers> peers;
  bool counts = true;
};

std::mutex& scope_mutex() {
  static std::mutex mutex;
  return mutex;
}

std::optional<OpenScope>& open_scope() {
  static std::optional<OpenScope> scope;
  return scope;
}

/// Keeps the scope for the backward, which may run after the scope has closed.
struct ScopeHolder : torch::CustomClassHolder {
  OpenScope scope;
};

Tensor gather_rows(const OpenScope& scope, const Tensor& own) {
  return scope.peers ? scope.peers->gather(own) : own.unsqueeze(0);
}

std::vector<int64_t> all_but_channels(const Tensor& x) {
  std::vector<int64_t> dims = {0};
  for (int64_t i = 2; i < x.dim(); ++i) dims.push_back(i);
  return dims;
}

/// Views `values` (C) so that it broadcasts over x (N, C, …).
Tensor by_channel(const Tensor& values, const Tensor& x) {
  std::vector<int64_t> sizes(static_cast<size_t>(x.dim()), 1);
  sizes[1] = values.numel();
  return values.view(sizes);
}

/// Type in which the statistics of `x` are computed.
torch::ScalarType statistics_type(const Tensor& x) {
  return c10::promoteTypes(x.scalar_type(), torch::kFloat);
}

Tensor to_cpu_double(const Tensor& values) {
  return values.to(torch::kDouble).cpu();
}

struct Statistics {
  Tensor mean, variance;  // (C), float64 on the CPU
  double count = 0;       // values per channel
};

Statistics statistics_of(const Tensor& x, const OpenScope& scope) {
  const int64_t channels = x.size(1);
  Tensor own = torch::zeros({2 * channels + 1}, torch::kDouble);
  if (scope.counts) {
    const auto [variance, mean] = torch::var_mean(
        x.to(statistics_type(x)), all_but_channels(x), /*unbiased=*/false,
        /*keepdim=*/false);
    own[0] = static_cast<double>(x.numel() / channels);
    own.narrow(0, 1, channels).copy_(to_cpu_double(mean));
    own.narrow(0, 1 + channels, channels).copy_(to_cpu_double(variance));
  }
  const Tensor all = gather_rows(scope, own);
  const Tensor counts = all.narrow(1, 0, 1);
  const Tensor means = all.narrow(1, 1, channels);
  const Tensor variances = all.narrow(1, 1 + channels, channels);
  Statistics result;
  result.count = counts.sum().item<double>();
  TORCH_CHECK(result.count > 1,
              "[sync_batch_norm] expected more than one value per channel over "
              "all peers, got ",
              result.count);
  result.mean = (counts * means).sum(0) / result.count;
  const Tensor difference = means - result.mean;
  result.variance =
      (counts * (variances + difference * difference)).sum(0) / result.count;
  return result;
}

void update_running(const BatchNormState& norm, const Statistics& now) {
  Tensor(norm.num_batches_tracked).add_(1);
  const double momentum = norm.momentum
                              ? *norm.momentum
                              : 1.0 / norm.num_batches_tracked.item<double>();
  const auto update = [&](Tensor running, const Tensor& value) {
    running.mul_(1 - momentum).add_(value.to(running.options()), momentum);
  };
  update(norm.running_mean, now.mean);
  update(norm.running_var, now.variance * (now.count / (now.count - 1)));
}

class SyncBatchNormOperator
    : public torch::autograd::Function<SyncBatchNormOperator> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x,
                        const Tensor& weight, const Tensor& bias,
                        const Tensor& mean, const Tensor& variance, double eps,
                        double count, const OpenScope& scope) {
    const compat::AutocastGuard no_autocast(compat::AutocastState{});
    context->save_for_backward({x, weight, mean, torch::rsqrt(variance + eps)});
    auto holder = c10::make_intrusive<ScopeHolder>();
    holder->scope = scope;
    context->saved_data["scope"] = c10::IValue::make_capsule(holder);
    context->saved_data["count"] = count;
    return torch::batch_norm(x, weight, bias, mean.to(statistics_type(x)),
                             variance.to(statistics_type(x)),
                             /*training=*/false,
                             /*momentum=*/0, eps, /*cudnn_enabled=*/true);
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    detail::check_first_order("sync_batch_norm");
    const compat::AutocastGuard no_autocast(compat::AutocastState{});
    const variable_list saved = context->get_saved_variables();
    const Tensor& x = saved[0];
    const Tensor& weight = saved[1];
    const OpenScope scope = c10::static_intrusive_pointer_cast<ScopeHolder>(
                                context->saved_data["scope"].toCapsule())
                                ->scope;
    const double count = context->saved_data["count"].toDouble();
    const auto type = statistics_type(x);
    const auto dims = all_but_channels(x);
    const int64_t channels = x.size(1);

    // x̂ = (x − mean) / σ; dx = w/σ (dy − Σdy/n − x̂ Σ(dy x̂)/n), with sums over all peers.
    const Tensor inverse = saved[3].to(type);
    const Tensor dy = gradients[0].to(type);
    Tensor hat = x.to(type, /*non_blocking=*/false, /*copy=*/true);
    hat.sub_(by_channel(saved[2].to(type), x));
    hat.mul_(by_channel(inverse, x));
    const Tensor sum = dy.sum(dims);
    const Tensor sum_hat = (dy * hat).sum(dims);
    Tensor own = torch::zeros({2 * channels}, torch::kDouble);
    if (scope.counts) {
      own.narrow(0, 0, channels).copy_(to_cpu_double(sum));
      own.narrow(0, channels, channels).copy_(to_cpu_double(sum_hat));
    }
    const Tensor means =
        (gather_rows(scope, own).sum(0) / count).to(dy.options());
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

SyncBatchNormScope::SyncBatchNormScope(std::shared_ptr<BatchNormPeers> peers,
                                       bool counts) {
  const std::lock_guard lock(scope_mutex());
  TORCH_CHECK(!open_scope(), "[SyncBatchNormScope] another scope is open");
  open_scope() = OpenScope{std::move(peers), counts};
}

SyncBatchNormScope::~SyncBatchNormScope() {
  const std::lock_guard lock(scope_mutex());
  open_scope().reset();
}

bool SyncBatchNormScope::active() {
  const std::lock_guard lock(scope_mutex());
  return open_scope().has_value();
}

Tensor ops::sync_batch_norm(const BatchNormState& norm, const Tensor& x) {
  std::optional<OpenScope> scope;
  {
    const std::lock_guard lock(scope_mutex());
    scope = open_scope();
  }
  TORCH_CHECK(scope, "[sync_batch_norm] expected an open SyncBatchNormScope");
  TORCH_CHECK(norm.weight.defined() && norm.bias.defined() && x.dim() >= 2 &&
                  x.size(1) == norm.weight.numel(),
              "[sync_batch_norm] expected (N, C, …) and a weight and a bias of "
              "size C, got ",
              x.sizes());
  Statistics found;
  {
    const torch::NoGradGuard no_grad;
    const compat::AutocastGuard no_autocast(compat::AutocastState{});
    found = statistics_of(x.detach(), *scope);
    if (norm.running_mean.defined()) update_running(norm, found);
  }
  const auto here = x.options().dtype(torch::kDouble).requires_grad(false);
  return SyncBatchNormOperator::apply(
      x, norm.weight, norm.bias, found.mean.to(here), found.variance.to(here),
      norm.eps, found.count, *scope);
}

Tensor SyncBatchNorm2dImpl::forward(const Tensor& x) {
  _check_input_dim(x);
  if (is_training()) {
    if (SyncBatchNormScope::active()) {
      return ops::sync_batch_norm(batch_norm_state(*this), x);
    }
    TORCH_CHECK(x.numel() > x.size(1),
                "[SyncBatchNorm2d] expected more than one value per channel in "
                "training, got ",
                x.sizes());
    num_batches_tracked.add_(1);
  }
  return torch::batch_norm(x, weight, bias, running_mean, running_var,
                           is_training(), *options.momentum(), options.eps(),
                           at::globalContext().userEnabledCuDNN());
}

void SyncBatchNorm2dImpl::_check_input_dim(const Tensor& x) {
  TORCH_CHECK(x.dim() == 4, "[SyncBatchNorm2d] expected (N, C, H, W), got ",
              x.sizes());
}

}  // namespace reprise
