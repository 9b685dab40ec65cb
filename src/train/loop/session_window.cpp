// A session's windows: micro-batches, the update, and starting again where memory
// ran out.
#include "compat/denormals.h"
#include "compat/side_stream.h"
#include "train/loop/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace reprise::detail {

bool Session::train_window() {
  if (stop_agreed_) return false;
  const std::string what = fmt::format("update {}", state_.step + 1);
  oom_retry_.run(what,
                 [this] { window_snapshot_.remember(state_, samples_here_); });
  if (planned()) window_meter_.restart();
  graph_peak_bytes_ = std::max(graph_peak_bytes_, graphs_.peak_bytes());
  graphs_.restart_peak();
  bool whole = false;
  if (group_) {
    train_window_together();
    ++windows_;
    note_speed();
    keep_within_budget();
    show(false);
    return true;
  }
  try {
    oom_retry_.run(
        what, [&] { whole = try_window(); },
        [this] {
          drop_window();
          tighten_after_failure();
          restart_window();
        });
  } catch (const RetriesExhausted&) {
    // What was trained so far is not lost.
    if (!out_of_memory_in([this] { restart_window(); })) save();
    throw;
  }
  if (!whole) return false;
  ++windows_;
  note_speed();
  keep_within_budget();
  show(false);
  return true;
}

void Session::copy_weights() {
  if (copies_) {
    copies_->refresh();
  } else {
    copies_ = weight_copies_of(config_, config_.precision, model_, device_);
  }
}

void Session::drop_copies() {
  if (!copies_) return;
  graphs_.clear();
  copies_.reset();
}

bool Session::try_window() {
  copy_weights();
  // The second window shows what all later ones do: by then the optimizer has
  // its state. Where there is but one, that one.
  profiling_ = !profile_ && (windows_ >= 1 || total_steps_ - state_.step == 1);
  std::optional<Execution> metered;
  if (profiling_) {
    profile_.emplace(device_, ledger_, kept_);
    ExecutionOptions options{
        .meter = &kept_, .observer = &*profile_, .separate_graphs = true};
    if (group_) {
      options.final_from = [this](int stage) {
        if (reducing_) reducer_->final_from(stage);
      };
    }
    metered.emplace(model_.chain, schedule_, std::move(options));
  }
  WindowProfile* profile = profiling_ ? &*profile_ : nullptr;

  begin_window();
  while (!accumulator_.complete()) {
    if (!group_ && told_to_stop()) return false;
    train_micro_batch(metered ? *metered : execution_, profile);
  }
  while (norms_ && steps_left_ > 0) run_empty_micro_batch();
  if (group_) return true;  // the update is for all to agree on
  const bool updated = update(profile);
  if (profiling_ && !updated) profile_.reset();  // look again, at a whole one
  profiling_ = false;
  return true;
}

void Session::begin_window() {
  accumulator_.keep_gradients(graphs_.active());
  if (state_.micro > 0 && !group_) return;  // goes on
  while (loader_->epoch_ends()) loader_->next();
  const Loader::Window window = loader_->window_ahead();
  if (state_.micro == 0) {
    state_.total_count = static_cast<double>(window.total_count);
    step_.clear_loss();
    window_samples_ = 0;
  }
  accumulator_.begin_share(
      state_.total_count,
      group_ ? static_cast<double>(window.count) : state_.total_count);
  if (group_) {
    window_rest_ = window.samples;
    window_samples_ += window.samples;
    steps_left_ = steps_of(window);
    reducer_->keep_gradients(graphs_.active());
    start_random_numbers();
  }
}

void Session::drop_window() {
  accumulator_.abandon();
  batch_ = {};
  step_.clear_loss();
  if (profiling_) profile_.reset();
  profiling_ = false;
}

void Session::restart_window() {
  drop_window();
  if (window_snapshot_.state().micro > 0) {
    // Continued from disk in mid-window; the gradients so far are there.
    const auto saved = newest();
    TORCH_CHECK(saved && saved->state.step == window_snapshot_.state().step &&
                    saved->state.micro == window_snapshot_.state().micro,
                "[train] expected the state that was continued from, to start "
                "its window again, got another one or none");
    load(*saved);
  } else {
    state_ = window_snapshot_.state();
    scaler_.load(state_.scaler);
    window_snapshot_.restore();
  }
  samples_here_ = window_snapshot_.samples_here();
  open_loader();
}

void Session::train_micro_batch(Execution& execution, WindowProfile* profile) {
  auto batch = loader_->next();
  TORCH_INTERNAL_ASSERT(batch.has_value());
  batch_ = std::move(*batch);
  move_to(batch_, device_);
  prepare(batch_, prepare_);
  if (group_) group_->heartbeat();
  const double weight =
      accumulator_.weigh(static_cast<double>(batch_.count)) * scaler_.scale();
  step_.set_weight(weight);
  const Tensors inputs = {batch_.inputs, batch_.targets};
  // Not before a window was looked into, which cannot be done with a graph.
  const bool with_graph = profile == nullptr && profile_;
  const compat::CaptureExpected capture(graphs_.active());
  if (!with_graph) graphs_.see(inputs);
  if (!with_graph || !graphs_.run(inputs, [this](const Tensors& batch) {
        step_.run(execution_, batch);
      })) {
    // What the last one leaves is final: it goes on its way during the backward.
    --steps_left_;
    reducing_ =
        group_ && accumulator_.complete() && (!norms_ || steps_left_ == 0);
    std::optional<SyncBatchNormScope> shared;
    if (norms_) shared.emplace(norms_);
    step_.run(execution, inputs, profile, /*final_on_the_way=*/reducing_);
    reducing_ = false;
  }
  if (group_) return;  // a window counts as a whole
  window_samples_ += batch_.samples;
  state_.samples += batch_.samples;
  samples_here_ += batch_.samples;
  state_.done_count = accumulator_.done_count();
  state_.position = loader_->position();
  ++state_.micro;
}

bool Session::update(WindowProfile* profile) {
  // Graphs are made after the window that is looked into.
  std::optional<MemoryMeter> meter;
  if (profile != nullptr) {
    profile->begin("update");
    meter.emplace(device_);
  }
  const double rate = rate_at(rate_, state_.step);
  torch::Tensor norm;
  const bool finite = ready_gradients(norm);
  // Before the update: after it nothing may fail.
  torch::Tensor loss;
  within_update([&] {
    loss = (group_ ? window_loss_ : step_.loss()) / state_.total_count;
  });
  if (profile != nullptr && device_.is_cpu()) {
    std::vector<torch::Tensor> gradients;
    for (const auto& p : parameter_list_) gradients.push_back(p.grad());
    denormal_share_ = compat::denormal_share(gradients);
  }
  if (copies_) copies_->expire();
  accumulator_.update([&] {
    if (finite) step_optimizer(rate);
  });
  scaler_.update();
  if (profile != nullptr) {
    graphs_.set_between(meter->peak_increase_bytes());
    profile->end();
  }
  batch_ = {};
  state_.scaler = scaler_.state();
  state_.micro = 0;
  state_.done_count = 0;
  ++state_.step;
  metrics_->add(state_.step, loss, norm, rate, window_samples_);
  if (!finite) {
    warn(
        fmt::format("update {} skipped: the gradient overflowed; the scale is "
                    "now {:g}",
                    state_.step, scaler_.scale()));
  }
  return finite;
}

}  // namespace reprise::detail
