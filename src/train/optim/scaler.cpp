#include <reprise/train/scaler.h>

#include <torch/utils.h>

#include <cmath>
#include <limits>
#include <map>

namespace reprise {
namespace {

/// Unscales gradients on one CUDA device and checks that they are finite, with
/// one operator and without synchronization. Returns 0 on the device if all are
/// finite.
torch::Tensor unscale_on_cuda(const std::vector<torch::Tensor>& gradients,
                              double scale) {
  const auto options = gradients[0].options().dtype(torch::kFloat);
  auto found = torch::zeros({1}, options);
  const auto inverse = torch::full({1}, 1 / scale, options);
  at::_amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse);
  return found;
}

/// Returns whether all values are finite. Minimum and maximum are NaN if a
/// value is NaN, and need no temporary.
bool is_finite(const torch::Tensor& gradient) {
  const auto [least, most] = torch::aminmax(gradient);
  return std::isfinite(least.item<double>()) &&
         std::isfinite(most.item<double>());
}

}  // namespace

GradScaler::GradScaler(const Options& options) : options_(options) {
  if (!options_.enabled) return;
  const auto in = [](const char* name, double value, bool good,
                     const char* expected) {
    TORCH_CHECK(std::isfinite(value) && good, "[GradScaler] expected ", name,
                " ", expected, ", got ", value);
  };
  in("scale", options.scale, options.scale > 0, "above 0");
  in("growth", options.growth, options.growth >= 1, "of 1 or more");
  in("backoff", options.backoff, options.backoff > 0 && options.backoff < 1,
     "between 0 and 1");
  in("growth_interval", double(options.growth_interval),
     options.growth_interval >= 1, "of 1 or more");
  state_.scale = options.scale;
}

bool GradScaler::unscale(const std::vector<torch::Tensor>& parameters) {
  if (!options_.enabled) return true;
  TORCH_CHECK(!finite_.has_value(),
              "[GradScaler::unscale] expected update() first: the gradients of "
              "this window are divided already");
  const torch::NoGradGuard no_grad;
  std::map<int, std::vector<torch::Tensor>> on_cuda;
  std::vector<torch::Tensor> elsewhere;
  for (const auto& parameter : parameters) {
    const torch::Tensor& gradient = parameter.grad();
    if (!gradient.defined() || gradient.numel() == 0) continue;
    auto& list =
        gradient.is_cuda() ? on_cuda[gradient.get_device()] : elsewhere;
    list.push_back(gradient);
  }
  std::vector<torch::Tensor> found;
  for (const auto& [device, gradients] : on_cuda) {
    found.push_back(unscale_on_cuda(gradients, state_.scale));
  }
  bool finite = true;
  if (!elsewhere.empty()) at::_foreach_mul_(elsewhere, 1 / state_.scale);
  for (const auto& gradient : elsewhere) finite &= is_finite(gradient);
  for (const auto& any : found) finite &= any.item<float>() == 0;
  finite_ = finite;
  return finite;
}

void GradScaler::agree(bool finite) {
  if (options_.enabled && finite_.has_value()) finite_ = *finite_ && finite;
}

void GradScaler::update() {
  if (!options_.enabled) return;
  TORCH_CHECK(finite_.has_value(),
              "[GradScaler::update] expected unscale() first");
  const bool finite = *finite_;
  finite_.reset();
  if (!finite) {
    ++state_.skipped;
    state_.good_updates = 0;
    state_.scale *= options_.backoff;
    // Below this scale, 1 / scale may overflow a float.
    TORCH_CHECK(state_.scale >= std::numeric_limits<float>::min(),
                "[GradScaler::update] expected finite gradients at some scale, "
                "got none down to ",
                state_.scale, "; the loss itself is not finite");
    return;
  }
  if (++state_.good_updates < options_.growth_interval) return;
  state_.good_updates = 0;
  const double grown = state_.scale * options_.growth;
  if (grown <= std::numeric_limits<float>::max()) state_.scale = grown;
}

void GradScaler::load(const State& state) {
  TORCH_CHECK(std::isfinite(state.scale) && state.scale > 0,
              "[GradScaler::load] expected a scale above 0, got ", state.scale);
  state_ = state;
  if (!options_.enabled) state_.scale = 1;
  finite_.reset();
}

}  // namespace reprise
