#include "train/step/gradients.h"

#include "compat/denormals.h"

#include <cmath>

namespace reprise::detail {

Gradients::Gradients(const TrainSetup& setup, Ranks& ranks,
                     WindowExchange& exchange)
    : host_(setup.host_parameters.get()),
      clip_(setup.options.clip),
      fp16_(setup.options.precision == Precision::kFp16),
      device_(setup.device),
      parameters_(setup.parameter_list),
      ranks_(ranks),
      exchange_(exchange),
      accumulator_(setup.parameter_list),
      scaler_(scaler_of(setup.options)) {}

void Gradients::abandon() {
  accumulator_.abandon();
  if (host_ != nullptr) host_->forget_gradients();
}

Gradients::Ready Gradients::make_ready(
    const std::function<void(const std::function<void()>&)>& guarded,
    const std::function<void()>& hook) {
  Ready ready;
  if (!exchange_.sharded()) {
    guarded([&] { ready.finite = scaler_.unscale(parameters_); });
    if (!ready.finite) return ready;
    hook();
    if (clip_ <= 0) return ready;
    guarded([&] { ready.norm = accumulator_.clip(clip_); });
    return ready;
  }
  // Each rank has the gradients of its shards; the norm is over all ranks.
  const auto shards = values(exchange_.updated_parameters({}));
  guarded([&] { ready.finite = scaler_.unscale(shards); });
  if (fp16_) {
    ready.finite = !ranks_.any(!ready.finite);
    scaler_.agree(ready.finite);
  }
  if (!ready.finite) return ready;
  hook();
  if (clip_ <= 0) return ready;
  double own = 0;
  guarded([&] { own = gradient_norm(shards).item<double>(); });
  // Groups of ranks have the same sums.
  const double copies =
      static_cast<double>(ranks_.size()) / exchange_.sharing_ranks();
  const double all =
      std::sqrt(ranks_.all_reduce_sum({own * own}).at(0) / copies);
  guarded([&] {
    ready.norm =
        torch::scalar_tensor(all, torch::dtype(torch::kFloat).device(device_));
    clip_gradients(shards, ready.norm, clip_);
  });
  return ready;
}

void Gradients::update(bool finite, const std::function<void()>& step) {
  accumulator_.update([&] {
    if (finite) step();
  });
  scaler_.update();
}

double Gradients::denormal_share() const {
  if (!device_.is_cpu()) return 0;
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : parameters_) {
    gradients.push_back(parameter.grad());
  }
  return compat::denormal_share(gradients);
}

}  // namespace reprise::detail
