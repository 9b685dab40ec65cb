// ListOptimizer: updates in parts.
// Tested by tests/train/step/backward_update_test.cpp.
#include "train/optim/list_optimizer.h"

#include <cmath>

namespace reprise {
namespace {

// Numbers of missed updates for which there are values in device memory. Usually
// no parameter has missed any.
constexpr int64_t kSlots = 16;

}  // namespace

ListOptimizer::StepValues ListOptimizer::step_values(double, int64_t) const {
  return {};
}

bool ListOptimizer::reads_step_values(const torch::Tensor&,
                                      const Tensors&) const {
  return false;
}

bool ListOptimizer::captures() const {
  for (const Entry& entry : entries_) {
    if (!entry.parameter.requires_grad()) continue;
    if (!has_fused(entry.parameter.device()) ||
        !reads_step_values(entry.parameter, entry.state)) {
      return false;
    }
  }
  return true;
}

std::string ListOptimizer::capture_refusal() const {
  if (host_) {
    return "with --update backward the step contains the update, whose state "
           "is in host memory (--state host)";
  }
  const bool cuda = !entries_.empty() && entries_[0].parameter.is_cuda();
  if (!cuda || captures()) return "";
  return "with --update backward the step contains the update, and only "
         "those of adam and adamw can be captured, with the kernels of "
         "Reprise and parameters in fp32";
}

void ListOptimizer::begin_update(double lr) {
  TORCH_CHECK(std::isfinite(lr) && lr >= 0,
              "[Optimizer] expected a learning rate of 0 or more, got ", lr);
  const torch::NoGradGuard no_grad;
  for (Entry& entry : entries_) {
    if (entry.parameter.requires_grad() && entry.parameter.numel() > 0) {
      make_state(entry);
    }
  }
  lr_ = lr;
  const bool cuda = !entries_.empty() && entries_[0].parameter.is_cuda();
  if (cuda && !host_ && !step_values_.defined() && captures()) {
    step_values_ = torch::zeros(
        {kSlots, kStepValues},
        entries_[0].parameter.detach().options().dtype(torch::kFloat));
  }
  for (const auto& [missed, slot] : slots_) write_step_values(missed, slot);
}

void ListOptimizer::write_step_values(int64_t missed, int64_t slot) {
  // Fill on the device, without a copy or synchronization.
  const StepValues values = step_values(lr_, step_ - missed + 1);
  for (int i = 0; i < kStepValues; ++i) {
    step_values_.select(0, slot).select(0, i).fill_(
        values[static_cast<size_t>(i)]);
  }
}

void ListOptimizer::add_step_values(List& list,
                                    const std::vector<Entry*>& entries,
                                    bool captured) {
  if (!step_values_.defined()) return;
  for (size_t i = 0; i < entries.size(); ++i) {
    const int64_t missed = step_ - entries[i]->count;
    auto found = slots_.find(missed);
    if (found == slots_.end()) {
      TORCH_CHECK(!captured,
                  "a parameter had no gradient before the capture: '",
                  entries[i]->name, "'");
      if (static_cast<int64_t>(slots_.size()) == kSlots) {
        list.step_values.clear();  // such updates are not captured
        return;
      }
      const auto slot = static_cast<int64_t>(slots_.size());
      found = slots_.emplace(missed, slot).first;
      write_step_values(missed, slot);
    }
    list.step_values.push_back(step_values_.data_ptr<float>() +
                               found->second * kStepValues);
    // The kernel needs aligned gradients; those of views may not be.
    if (!reads_step_values(list.gradients[i], entries[i]->state)) {
      list.gradients[i] =
          torch::empty_like(list.parameters[i]).copy_(list.gradients[i]);
    }
  }
}

void ListOptimizer::update_some(const std::vector<torch::Tensor>& parameters,
                                bool captured) {
  std::vector<Entry*> entries;
  for (const torch::Tensor& parameter : parameters) {
    const auto found = places_.find(parameter.unsafeGetTensorImpl());
    if (found == places_.end()) continue;
    Entry& entry = entries_[found->second];
    if (has_gradient(entry)) entries.push_back(&entry);
  }
  if (!entries.empty()) apply(entries, lr_, /*partial=*/true, captured);
}

void ListOptimizer::end_update(const std::vector<torch::Tensor>& updated) {
  for (const torch::Tensor& parameter : updated) {
    const auto found = places_.find(parameter.unsafeGetTensorImpl());
    if (found != places_.end()) ++entries_[found->second].count;
  }
  ++step_;
}

}  // namespace reprise
