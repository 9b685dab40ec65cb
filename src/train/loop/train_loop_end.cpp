// TrainLoop between windows and at the end: agreement of ranks, evaluation,
// saving, progress and summary.
// Tested by tests/train/loop/trainer_test.cpp.
#include "train/loop/train_loop.h"
#include "train/store/export_model.h"

#include <reprise/memory/meter.h>
#include <reprise/models/model.h>

#include <algorithm>

namespace reprise::detail {

void TrainLoop::agree_after_window() {
  const bool first = ranks_->first();
  if (ranks_->can_stop_in_window()) {
    save_agreed_ = saver_.time_is_up();
    return;  // a single process stops between micro-batches
  }
  const auto agreed = ranks_->all_reduce_max(
      {told_to_stop() ? 1 : 0, first && clock_.time_is_up() ? 1 : 0,
       first && saver_.time_is_up() ? 1 : 0});
  stop_agreed_ = agreed[0] > 0;
  clock_.set_time_is_up(agreed[1] > 0);
  save_agreed_ = agreed[2] > 0;
}

void TrainLoop::evaluate_if_due() {
  if (!evaluator_.enabled()) return;
  const int64_t every = setup_.options.eval_every;
  const bool due =
      every > 0 ? state_.step % every == 0 : source_.loader().epoch_done();
  if (due || at_end()) evaluate();
}

void TrainLoop::save() {
  runner_.restore_weights();
  saver_.save(state_, window_.samples);
}

void TrainLoop::evaluate() {
  runner_.restore_weights();
  reporter_.training(false);
  {
    const RunClock::Pause pause(clock_);
    // A plan includes the read-ahead batches of one loader, not of two.
    source_.close();
    const auto result =
        evaluator_.run(state_.step, [this] { return told_to_stop(); });
    state_.evaluation_due = !result;
    if (result) {
      evaluation_ = {state_.step, result->loss, result->metrics};
      retry_.run("fetching the losses",
                 [this] { reporter_.metrics().add(*evaluation_); });
      reporter_.evaluated(*evaluation_);
    }
    source_.open(state_.position);
  }
  reporter_.training(true);
}

void TrainLoop::save_if_due() {
  const int64_t every = setup_.options.save_every;
  const bool due = every > 0 ? state_.step % every == 0 : save_agreed_;
  if (due && !at_end()) save();
}

void TrainLoop::show(bool now) {
  const bool due = reporter_.step_due(now);
  Metrics& metrics = reporter_.metrics();
  if (!due && !metrics.full()) return;
  retry_.run("fetching the losses", [&] {
    if (now || !metrics.last_loss()) {
      metrics.flush();
    } else {
      metrics.collect();
    }
  });
  if (!due || reporter_.listener() == nullptr) return;
  const TrainOptions& options = setup_.options;
  const double speed = clock_.samples_per_s(samples_here_);
  const double left_samples = static_cast<double>(total_steps_ - state_.step) *
                              static_cast<double>(options.global_batch);
  double left_s = speed > 0 ? left_samples / speed : 0;
  if (options.seconds > 0) {
    left_s =
        std::min(left_s, std::max(0.0, options.seconds - clock_.seconds()));
  }
  reporter_.stepped({state_.step, options.seconds > 0 ? 0 : total_steps_,
                     metrics.last_loss().value_or(0),
                     learning_rate(setup_, lr_schedule_,
                                   std::max<int64_t>(state_.step - 1, 0)),
                     speed, meter_.live_bytes() + runner_.graphs().bytes(),
                     peak_bytes(), options.memory_limit, left_s});
}

int64_t TrainLoop::peak_bytes() {
  return std::max(
      {meter_.peak_bytes(), graph_peak_bytes_, runner_.graphs().peak_bytes()});
}

TrainResult TrainLoop::finish() {
  clock_.wait_for_device();
  reporter_.end_training();
  const double trained_s = clock_.seconds();
  const double speed = clock_.samples_per_s(samples_here_);
  const auto doubts =
      clock_.doubts(source_.waited_s(), profiler_.denormal_share());
  const bool stopped = state_.step < total_steps_ && !clock_.time_is_up();
  state_.finished = !stopped;
  const bool unchanged =
      run_.resume && samples_here_ == 0 && state_.samples > 0 && !evaluation_;
  show(true);
  save();
  export_if_wanted(stopped);
  TrainSummary summary = summarize(trained_s, speed);
  summary.warnings = doubts;
  return {std::move(summary), stopped, saver_.failed(), unchanged};
}

void TrainLoop::export_if_wanted(bool stopped) {
  const bool wanted = !stopped && !run_.export_path.empty() && ranks_->first();
  // Divided parameters are gathered by all ranks.
  if (setup_.sharded ? !ranks_->any(wanted) : !wanted) return;
  const HostParameters::Readable readable(setup_.host_parameters.get());
  const ShardedParameters::Readable whole(setup_.sharded.get());
  if (!wanted) return;
  retry_.run("exporting",
             [this] { export_model(setup_.model, run_.export_path); });
}

TrainSummary TrainLoop::summarize(double trained_s, double speed) {
  const TrainOptions& options = setup_.options;
  TrainSummary s;
  s.model = setup_.model.name;
  s.device = options.device;
  s.precision = to_text(options.precision);
  s.optimizer = optimizer_name(setup_);
  s.recompute = runner_.schedule().name();
  s.data = setup_.data.name;
  s.parameters = parameter_count(setup_.model);
  s.micro_batch = options.batch;
  s.accumulate = options.accumulate;
  s.global_batch = options.global_batch;
  s.ranks = options.ranks;
  if (const auto* reduced = exchange_->counters()) {
    s.backend = ranks_->group()->backend();
    s.reduce_calls = reduced->calls;
    s.reduce_bytes = reduced->bytes;
    s.reduce_windows = reduced->windows;
    s.reduce_s = reduced->busy_s;
    s.reduce_wait_s = reduced->exposed_s;
    s.gather_calls = reduced->gather_calls;
    s.gather_bytes = reduced->gather_bytes;
  }
  if (setup_.sharded) {
    const auto& gathered = setup_.sharded->counters();
    s.gather_calls += gathered.calls;
    s.gather_bytes += gathered.bytes;
    s.gather_wait_s = gathered.wait_s;
  }
  s.steps = state_.step;
  s.skipped = state_.scaler.skipped;
  s.time_s = clock_.previous_seconds() + trained_s;
  s.samples_per_s = speed;
  s.wait_s = source_.waited_s();
  s.data_samples =
      is_stream(*setup_.data.train) ? 0 : setup_.data.train->epoch_size();
  s.loss = reporter_.metrics().last_loss();
  if (evaluation_) {
    s.eval_loss = evaluation_->loss;
    s.eval_metrics = evaluation_->metrics;
  }
  s.peak_bytes = peak_bytes();
  s.dataset_bytes = setup_.dataset_bytes;
  if (setup_.device.is_cuda()) s.reserved_bytes = meter_.reserved_peak_bytes();
  s.rss_peak_bytes = process_memory().rss_peak;
  if (setup_.host) s.host_bytes = setup_.host->held_bytes();
  s.host_state_bytes = runner_.host_state_bytes();
  if (setup_.host_parameters) {
    s.host_state_bytes += setup_.host_parameters->host_bytes();
  }
  s.limit_bytes = options.memory_limit;
  if (budget_.planned()) {
    s.predicted = {budget_.predicted_peak_bytes(), budget_.predicted_step_ms()};
  }
  s.replans = budget_.replans();
  s.graph = runner_.graphs().state();
  s.graph_captures = runner_.graphs().captures();
  s.graph_replays = runner_.graphs().replays();
  profiler_.describe(s);
  return s;
}

}  // namespace reprise::detail
