#include "train/loop/train_loop.h"

#include "base/splitmix.h"
#include "compat/cpu_allocator.h"
#include "compat/cuda_graph.h"
#include "compat/denormals.h"
#include "train/budget/device_settings.h"
#include "train/config/update_refusal.h"
#include "train/store/export_model.h"

#include <reprise/memory/meter.h>

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <utility>

namespace reprise::detail {
namespace {

/// Returns the ranks of the training, after they have agreed on settings for their devices:
/// the components depend on them.
std::unique_ptr<Ranks> make_settled_ranks(TrainSetup& setup,
                                          TrainerOptions& options) {
  auto ranks = make_ranks(std::move(options.ranks));
  if (ranks->group()) {
    TORCH_CHECK(setup.options.update != UpdateMode::kBackward,
                "[--update] backward: ranks add up their gradients "
                "first; use --update after");
    TORCH_CHECK(setup.options.gradients == GradientSums::kFp32,
                "[--gradients] bf16: ranks add up their gradients first; use "
                "--gradients fp32");
    setup.options.update = UpdateMode::kAfter;
  }
  settle_device_settings(
      setup, *ranks,
      {.memory = setup.options.memory_limit, .say = options.planning.progress});
  return ranks;
}

}  // namespace

TrainLoop::TrainLoop(TrainSetup setup, TrainerOptions options)
    : setup_(std::move(setup)),
      ranks_(make_settled_ranks(setup_, options)),
      clock_(setup_.device),
      exchange_(make_window_exchange(*ranks_, setup_)),
      optimizer_(
          exchange_->sharded()
              ? make_optimizer(setup_.options.optimizer,
                               exchange_->updated_parameters(setup_.parameters))
              : optimizer_of(setup_)),
      runner_(setup_, *exchange_, schedule_of(setup_),
              {setup_.options.graph,
               [this](const std::string& text) { reporter_.warn(text); },
               optimizer_.get(),
               setup_.options.update == UpdateMode::kBackward ||
                       updates_in_last(setup_.options)
                   ? UpdateMode::kBackward
                   : UpdateMode::kAfter}),
      retry_(
          setup_.device,
          [this](const std::string& text) { reporter_.warn(text); },
          [this] { runner_.graphs().drop_for_memory(); }),
      source_(setup_, *ranks_),
      gradients_(setup_, *ranks_, *exchange_),
      lr_schedule_(lr_schedule_of(setup_.options)),
      profiler_(setup_, source_, runner_, *optimizer_),
      saver_({setup_, *ranks_, *exchange_, runner_, gradients_, *optimizer_,
              retry_, clock_, reporter_}),
      evaluator_(setup_, *ranks_, runner_, retry_),
      budget_({setup_, *ranks_, *exchange_, runner_, gradients_, retry_,
               [this](const std::string& text) { reporter_.warn(text); },
               [this](bool sizes) {
                 profiler_.reset();  // it describes the previous schedule
                 if (sizes) saver_.save_config();
               }}),
      meter_(setup_.device) {
  state_.scaler = gradients_.scaler().state();
  const compat::FlushDenormals flush(setup_.device);
  const compat::GraphStreamScope stream(setup_.device,
                                        runner_.graphs().active());
  budget_.plan(std::move(options.planner), options.planning);
  if (budget_.planned()) return;
  if (runner_.moves_parameters() && setup_.options.state == StatePlace::kAuto) {
    // They did not fit on the device.
    setup_.options.state = StatePlace::kHostAll;
    runner_.set_update(UpdateMode::kBackward);
  }
  runner_.set_state(setup_.options.state, setup_.options.accumulate > 1);
}

TrainResult TrainLoop::run(const TrainRun& run) {
  run_ = run;
  const auto fail = [this](const std::string& what) {
    ranks_->fail(fmt::format("rank {} failed: {}", ranks_->rank(), what));
    try {
      runner_.restore_weights();
    } catch (const c10::Error& error) {
      // The device failed; the caller gets the first error.
      reporter_.warn(fmt::format("the weights could not be restored: {}",
                                 error.what_without_backtrace()));
    }
  };
  try {
    return run_to_end();
  } catch (const c10::Error& error) {
    fail(error.what_without_backtrace());
    throw;
  } catch (const std::exception& error) {
    fail(error.what());
    throw;
  }
}

TrainResult TrainLoop::run_to_end() {
  const compat::FlushDenormals flush(setup_.device);
  const compat::GraphStreamScope stream(setup_.device,
                                        runner_.graphs().active());
  start();
  clock_.note_window_end();
  while (!at_end()) {
    if (!train_window()) break;
    clock_.note_window_end();
    clock_.check_limit();
    agree_after_window();
    evaluate_if_due();
    save_if_due();
  }
  return finish();
}

bool TrainLoop::at_end() const {
  return clock_.time_is_up() || state_.step >= total_steps_;
}

bool TrainLoop::train_window() {
  if (stop_agreed_) return false;
  const std::string what = fmt::format("update {}", state_.step + 1);
  retry_.run(what,
             [this] { setup_.snapshot->remember(state_, samples_here_); });
  budget_.begin_window();
  graph_peak_bytes_ =
      std::max(graph_peak_bytes_, runner_.graphs().peak_bytes());
  runner_.graphs().restart_peak();
  bool complete = false;
  OomRetry::Recovery recovery;
  recovery.drop = [this] { drop_window(); };
  recovery.restore = [this] {
    drop_window();  // also on ranks that have not failed
    budget_.tighten_after_failure();
    restart_window();
  };
  if (ranks_->group()) {
    recovery.agree = [this](bool failed) {
      if (failed) exchange_->abort_attempt();
      ranks_->pause_watchdog();
      return ranks_->any(failed);
    };
  }
  try {
    retry_.run(
        what, [&] { complete = attempt_window(); }, recovery);
  } catch (const RetriesExhausted&) {
    // Save all complete updates.
    if (!runner_.half_updated() &&
        !out_of_memory_in([this] { restart_window(); })) {
      save();
    }
    throw;
  }
  if (!complete) return false;
  if (!ranks_->can_stop_in_window()) {
    // No rank has failed, so the whole window counts.
    source_.loader().advance_window();
    state_.position = source_.loader().position();
    state_.samples += window_.left;
    samples_here_ += window_.left;
    update();
  }
  if (clock_.window_done(samples_here_, runner_.graphs().captures(),
                         source_.waited_s())) {
    reporter_.begin_training();
  }
  if (budget_.end_window(state_.step, runner_.take_continued())) {
    source_.open(state_.position);
  }
  show(false);
  return true;
}

bool TrainLoop::attempt_window() {
  try {
    exchange_->begin_attempt();
    runner_.refresh_weight_copies();
    // The plan may use memory that separate graphs would need.
    const bool tight = budget_.planned() && budget_.current()->extra_bytes < 0;
    profiler_.begin_window(clock_.windows(), total_steps_ - state_.step,
                           /*separate_graphs=*/!tight);
    begin_window();
    if (!run_micro_batches()) {
      runner_.expire_weight_copies();  // the state is saved next
      return false;
    }
    window_.loss = exchange_->finish(runner_.loss());
  } catch (const c10::Error& error) {
    runner_.expire_weight_copies();
    if (exchange_->failed_elsewhere()) throw FailedOnAnotherRank();
    // Not an error that is retried, nor one after which the state is saved.
    TORCH_CHECK(!runner_.half_updated() || !is_out_of_memory(error),
                "[--update] no memory in the backward of update ",
                state_.step + 1,
                " after it had updated some parameters, which are neither old "
                "nor new; resume from the last saved state, with a smaller "
                "--memory or --update after");
    throw;
  }
  if (ranks_->can_stop_in_window()) update();
  return true;
}

bool TrainLoop::run_micro_batches() {
  // The last samples of a window may have a count of 0.
  while (!gradients_.complete() || !source_.loader().window_done()) {
    // The rest of an updated window has a count of 0.
    if (ranks_->can_stop_in_window() && !window_.updated_in_backward &&
        told_to_stop()) {
      return false;
    }
    train_micro_batch();
  }
  while (exchange_->needs_empty_micro_batch()) {
    const Batch batch = source_.any_sample();
    ranks_->heartbeat();
    runner_.run_empty(batch);
  }
  return true;
}

void TrainLoop::begin_window() {
  const bool keep = runner_.graphs().active() && !runner_.updates_in_backward();
  gradients_.keep_in_place(keep);
  window_.updated_in_backward = false;
  const bool whole = !ranks_->can_stop_in_window();
  if (state_.micro > 0 && !whole) return;  // resumed within the window
  const Loader::Window ahead = source_.window_ahead();
  if (state_.micro == 0) {
    TORCH_CHECK(ahead.total_count > 0,
                "[Trainer] expected a count above 0 in every window, got 0 for "
                "the ",
                ahead.samples, " samples of update ", state_.step + 1,
                ": there is nothing to learn from them; leave them out of the "
                "data or use a larger global batch");
    state_.total_count = static_cast<double>(ahead.total_count);
    runner_.micro_step().clear_loss();
    window_.samples = 0;
  }
  gradients_.begin(state_.total_count, whole ? static_cast<double>(ahead.count)
                                             : state_.total_count);
  if (!whole) return;
  window_.left = ahead.samples;
  window_.samples += ahead.samples;
  exchange_->begin_window(ahead, setup_.options.batch, keep, runner_.visits());
  seed_window();
}

void TrainLoop::seed_window() {
  // Each rank has its own random numbers. Those of a window do not depend on
  // earlier windows, so that a saved state need not contain them for every
  // rank.
  if (ranks_->size() == 1) return;
  const uint64_t window =
      splitmix(setup_.options.seed, static_cast<uint64_t>(state_.step));
  torch::manual_seed(
      splitmix(window, static_cast<uint64_t>(ranks_->rank()) + 1));
}

const Batch& TrainLoop::next_batch() {
  if (profiler_.active() == nullptr) return source_.next();
  MemoryMeter meter(setup_.device);
  const int64_t before = meter.live_bytes();
  const Batch& batch = source_.next();
  const int64_t kept = std::max<int64_t>(0, meter.live_bytes() - before);
  runner_.graphs().note_between(meter.peak_increase_bytes() - kept);
  return batch;
}

void TrainLoop::train_micro_batch() {
  const Batch& batch = next_batch();
  ranks_->heartbeat();
  if (batch.count > 0) {  // otherwise its loss is 0
    StepRunner::Run how;
    how.weight = gradients_.weigh(static_cast<double>(batch.count));
    how.last = gradients_.complete();
    // The profiled window and those before it run without CUDA graphs.
    how.profile = profiler_.active();
    how.allow_graph = how.profile == nullptr && profiler_.seen();
    how.seed = splitmix(
        splitmix(~setup_.options.seed, static_cast<uint64_t>(state_.step)),
        static_cast<uint64_t>(state_.micro));
    // A window that was resumed in the middle has exact gradients on the device, unless the
    // last micro-batch of every window updates.
    const bool whole = state_.micro == 0 || updates_in_last(setup_.options) ||
                       runner_.moves_parameters();
    if (runner_.updates_in_backward() && whole && how.last) {
      how.update_lr = learning_rate(setup_, lr_schedule_, state_.step);
      window_.updated_in_backward = true;
    }
    runner_.run(batch, how);
  }
  if (!ranks_->can_stop_in_window()) return;
  window_.samples += batch.samples;
  state_.samples += batch.samples;
  samples_here_ += batch.samples;
  state_.done_count = gradients_.done_count();
  state_.position = source_.loader().position();
  ++state_.micro;
}

void TrainLoop::drop_window() {
  runner_.restore_weights();
  gradients_.abandon();
  if (auto* half = runner_.half_gradients()) half->forget();
  source_.release();
  runner_.micro_step().clear_loss();
  profiler_.drop_window();
}

void TrainLoop::restart_window() {
  drop_window();
  const WindowSnapshot& snapshot = *setup_.snapshot;
  if (snapshot.state().micro > 0) {
    // The window was resumed from disk; read the gradients again.
    const auto saved = saver_.newest();
    TORCH_CHECK(saved && saved->state.step == snapshot.state().step &&
                    saved->state.micro == snapshot.state().micro,
                "[train] expected the state that was resumed from, to repeat "
                "its window, got another one or none");
    saver_.restore(*saved, state_, window_.samples);
  } else {
    state_ = snapshot.state();
    gradients_.scaler().load(state_.scaler);
    snapshot.restore();
  }
  samples_here_ = snapshot.samples_here();
  source_.open(state_.position);
}

void TrainLoop::update() {
  WindowProfile* profile = profiler_.active();
  std::optional<MemoryMeter> meter;
  if (profile != nullptr) {
    profile->begin("update");
    meter.emplace(setup_.device);
  }
  const bool updated = window_.updated_in_backward;
  TORCH_INTERNAL_ASSERT(updated || !runner_.moves_parameters());
  if (!updated) runner_.expire_weight_copies(keeps_split_);
  const double lr = learning_rate(setup_, lr_schedule_, state_.step);
  const auto guarded = [this](const std::function<void()>& part) {
    guard_update(part);
  };
  Gradients::Ready ready;
  if (!updated) {
    ready = gradients_.make_ready(guarded, [this] {
      if (reporter_.listener() == nullptr) return;
      reporter_.listener()->gradients_ready(state_.step + 1, setup_.parameters);
    });
  }
  // Compute the loss before the update, because nothing may fail after it.
  torch::Tensor loss;
  guarded([&] { loss = window_.loss / state_.total_count; });
  if (profile != nullptr) {
    profiler_.set_denormal_share(
        updated ? runner_.backward_update()->denormal_share()
                : gradients_.denormal_share());
  }
  gradients_.update(ready.finite, [&] {
    if (updated) return runner_.finish_update();
    guarded([&] { optimizer_->step(lr); });
    exchange_->share_updated(guarded);
  });
  if (!keeps_split_) runner_.restore_weights();  // from updates in the backward
  if (profile != nullptr) {
    // CUDA graphs are captured after the profiled window, and do not share this
    // memory.
    runner_.graphs().note_between(meter->peak_increase_bytes());
    profile->end();
  }
  source_.release();
  state_.scaler = gradients_.scaler().state();
  state_.micro = 0;
  state_.done_count = 0;
  ++state_.step;
  reporter_.metrics().add(state_.step, loss, ready.norm, lr, window_.samples);
  reporter_.updated(state_.step);
  profiler_.end_window(ready.finite);
  if (!ready.finite) {
    reporter_.warn(
        fmt::format("update {} skipped: the gradient overflowed; the scale is "
                    "now {:g}",
                    state_.step, gradients_.scaler().scale()));
  }
}

void TrainLoop::guard_update(const std::function<void()>& part) {
  if (ranks_->can_stop_in_window() && !runner_.half_updated()) {
    part();  // the whole window is repeated
  } else {
    retry_.run(fmt::format("the step of update {}", state_.step + 1), part);
  }
}

}  // namespace reprise::detail
