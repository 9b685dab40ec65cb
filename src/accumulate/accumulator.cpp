#include "compat/foreach.h"

#include <reprise/accumulate/accumulator.h>

#include <c10/util/Exception.h>

#include <cmath>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace reprise {
namespace {

// Counts of samples are whole numbers, but weights of tokens may be fractions,
// whose sum differs from the total by rounding.
constexpr double kCountTolerance = 1e-9;

/// Parameters whose gradients belong to an open window of this process, each with
/// its claim.
struct ClaimedParameters {
  std::mutex mutex;
  std::unordered_map<const c10::TensorImpl*, const void*> claims;
};

ClaimedParameters& claimed_parameters() {
  static auto* all = new ClaimedParameters;  // never destroyed
  return *all;
}

/// Claims the gradients of parameters during its lifetime.
class GradientClaim {
 public:
  /// If another window has claimed one of the parameters, takes over or throws
  /// c10::Error.
  GradientClaim(const std::vector<torch::Tensor>& parameters, bool take_over)
      : parameters_(parameters) {
    ClaimedParameters& all = claimed_parameters();
    const std::lock_guard lock(all.mutex);
    for (const auto& parameter : parameters_) {
      TORCH_CHECK(
          take_over || !all.claims.contains(parameter.unsafeGetTensorImpl()),
          "[Accumulator::begin] expected parameters of no other open window, "
          "got one of shape ",
          parameter.sizes(),
          " that another window accumulates into; close that window first, or "
          "train models that share no parameters");
    }
    for (const auto& parameter : parameters_) {
      all.claims[parameter.unsafeGetTensorImpl()] = this;
    }
  }
  ~GradientClaim() {
    ClaimedParameters& all = claimed_parameters();
    const std::lock_guard lock(all.mutex);
    std::erase_if(all.claims,
                  [this](const auto& item) { return item.second == this; });
  }
  GradientClaim(const GradientClaim&) = delete;
  GradientClaim& operator=(const GradientClaim&) = delete;

 private:
  // Held, so that no other parameter gets the same address.
  std::vector<torch::Tensor> parameters_;
};

}  // namespace

Accumulator::Accumulator(std::vector<torch::Tensor> parameters)
    : parameters_(std::move(parameters)) {
  TORCH_CHECK(!parameters_.empty(),
              "[Accumulator] expected parameters, got none");
}

void Accumulator::begin(double total_count) {
  TORCH_CHECK(total_ == 0,
              "[Accumulator::begin] a window is already open: ", done_, " of ",
              total_, " done; call update() or abandon() first");
  TORCH_CHECK(std::isfinite(total_count) && total_count > 0,
              "[Accumulator::begin] expected a positive total count, got ",
              total_count);
  if (!claim_) {
    claim_ = std::make_shared<GradientClaim>(parameters_, /*take_over=*/false);
  }
  total_ = own_ = total_count;
  done_ = 0;
}

void Accumulator::begin_share(double total_count, double own_count) {
  TORCH_CHECK(own_count >= 0 && own_count <= total_count,
              "[Accumulator::begin_share] expected own_count between 0 and ",
              total_count, ", got ", own_count);
  begin(total_count);
  own_ = own_count;
}

void Accumulator::resume(double total_count, double done_count) {
  TORCH_CHECK(done_count >= 0 && done_count <= total_count,
              "[Accumulator::resume] expected done_count between 0 and ",
              total_count, ", got ", done_count);
  // The gradients may be those of another object that does not go on.
  if (total_ == 0) {
    claim_ = std::make_shared<GradientClaim>(parameters_, /*take_over=*/true);
  }
  try {
    begin(total_count);
  } catch (...) {
    if (total_ == 0) claim_.reset();
    throw;
  }
  done_ = done_count;
}

double Accumulator::weigh(double count) {
  check_open("weigh");
  TORCH_CHECK(std::isfinite(count) && count > 0,
              "[Accumulator] expected a positive count for a micro-batch, got ",
              count, "; skip empty micro-batches");
  TORCH_CHECK(done_ + count <= own_ * (1 + kCountTolerance),
              "[Accumulator] expected counts that add up to ", own_, ", got ",
              done_ + count, " with this micro-batch of ", count,
              "; begin() takes the total count of the window");
  done_ += count;
  return 1.0 / total_;
}

void Accumulator::backward(const torch::Tensor& loss_sum, double count) {
  check_open("backward");
  TORCH_CHECK(
      loss_sum.defined() && loss_sum.numel() == 1,
      "[Accumulator] expected the sum of the losses as one element, got ",
      loss_sum.defined() ? "shape " : "an undefined tensor",
      loss_sum.defined() ? loss_sum.sizes() : torch::IntArrayRef());
  TORCH_CHECK(loss_sum.requires_grad(),
              "[Accumulator] expected a loss that requires a gradient, got one "
              "that does not; compute it with grad mode on, from parameters "
              "that require gradients");
  const double before = done_;
  const double weight = weigh(count);
  try {
    loss_sum.backward(torch::full_like(loss_sum, weight));
  } catch (...) {
    done_ = before;
    throw;
  }
}

bool Accumulator::complete() const {
  return total_ > 0 && done_ >= own_ * (1 - kCountTolerance);
}

torch::Tensor Accumulator::norm() const {
  check_complete("norm");
  return gradient_norm(parameters_);
}

torch::Tensor Accumulator::clip(double max_norm) {
  TORCH_CHECK(max_norm > 0,
              "[Accumulator::clip] expected a positive max_norm, got ",
              max_norm);
  check_complete("clip");
  torch::Tensor before = gradient_norm(parameters_);
  clip_gradients(parameters_, before, max_norm);
  return before;
}

void Accumulator::update(torch::optim::Optimizer& optimizer) {
  update([&] { optimizer.step(); });
}

void Accumulator::update(const std::function<void()>& step) {
  check_complete("update");
  step();
  if (keep_) {
    std::vector<torch::Tensor> gradients;
    for (const auto& parameter : parameters_) {
      if (parameter.grad().defined()) gradients.push_back(parameter.grad());
    }
    compat::zero_list(gradients);
  } else {
    drop_gradients();
  }
  close();
}

void Accumulator::abandon() {
  drop_gradients();
  close();
}

void Accumulator::check_open(const char* call) const {
  TORCH_CHECK(total_ > 0, "[Accumulator::", call,
              "] no window is open; call begin() first");
}

void Accumulator::check_complete(const char* call) const {
  check_open(call);
  TORCH_CHECK(complete(), "[Accumulator::", call,
              "] the window is not complete: ", done_, " of ", own_,
              " done; run the remaining micro-batches or call abandon()");
}

void Accumulator::drop_gradients() {
  for (auto& parameter : parameters_) parameter.mutable_grad().reset();
}

void Accumulator::close() {
  claim_.reset();
  total_ = 0;
  own_ = 0;
  done_ = 0;
}

torch::Tensor gradient_norm(const std::vector<torch::Tensor>& parameters) {
  const torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> norms;
  for (const auto& parameter : parameters) {
    const torch::Tensor gradient = parameter.grad();
    if (!gradient.defined()) continue;
    // Squares would overflow in half precision.
    const auto type = c10::promoteTypes(gradient.scalar_type(), torch::kFloat);
    norms.push_back(at::norm(gradient, 2, type));
  }
  if (norms.empty()) return torch::zeros({});
  for (auto& norm : norms) norm = norm.to(norms[0].device());
  return torch::stack(norms).norm(2);
}

void clip_gradients(const std::vector<torch::Tensor>& parameters,
                    const torch::Tensor& norm, double max_norm) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor factor = (max_norm / (norm + 1e-6)).clamp_max(1.0);
  for (const auto& parameter : parameters) {
    torch::Tensor gradient = parameter.grad();
    if (gradient.defined()) gradient.mul_(factor.to(gradient.device()));
  }
}

}  // namespace reprise
