// TrainLoop before the first window: listener, saved state and what it prints.
// Tested by tests/train/loop/trainer_test.cpp.
#include "compat/cpu_allocator.h"
#include "train/loop/train_loop.h"
#include "train/store/export_model.h"

#include <reprise/memory/meter.h>

#include <fmt/format.h>

namespace reprise::detail {
namespace {

/// Maximum number of windows of a run whose window times are recorded.
constexpr int64_t kShortRunWindows = 1000;

}  // namespace

void TrainLoop::start() {
  const TrainOptions& options = setup_.options;
  const int64_t window = options.global_batch;
  const int64_t windows_per_epoch =  // including a short last one
      (setup_.data.train->epoch_size() + window - 1) / window;
  total_steps_ =
      options.steps > 0 ? options.steps : options.epochs * windows_per_epoch;
  if (!run_.export_path.empty() && ranks_->first()) {
    check_export_path(setup_.model, run_.export_path);
  }
  reporter_.set_listener(run_.listener);
  if (run_.listener != nullptr && run_.listener->needs_gradients()) {
    TORCH_CHECK(options.update != UpdateMode::kBackward,
                "[--update] backward: the listener needs complete gradients; "
                "use after, or override TrainListener::needs_gradients()");
    TORCH_CHECK(options.gradients == GradientSums::kFp32,
                "[--gradients] bf16: the listener needs complete gradients; "
                "use fp32, or override TrainListener::needs_gradients()");
    TORCH_CHECK(options.state != StatePlace::kHostAll,
                "[--state] host-all: the listener needs complete gradients; "
                "use device or host, or override "
                "TrainListener::needs_gradients()");
    budget_.require_complete_gradients();
  }
  const bool listener_reads =
      run_.listener != nullptr &&
      (run_.listener->needs_gradients() || run_.listener->reads_parameters());
  keeps_split_ = !listener_reads && ranks_->size() == 1 &&
                 BackwardUpdate::supports(*optimizer_);
  saver_.start(run_.directory);
  const auto resume = [this] {
    drop_window();  // of a failed attempt
    if (const auto saved = saver_.newest()) {
      saver_.restore(*saved, state_, window_.samples);
    } else {
      reporter_.warn("the run has no state yet: it starts from the beginning");
    }
  };
  if (run_.resume && ranks_->group()) {
    resume();
  } else if (run_.resume) {
    TORCH_INTERNAL_ASSERT(run_.directory != nullptr);
    retry_.run("resuming", resume);
  }
  if (budget_.planned() || setup_.settings) saver_.save_config();
  source_.open(state_.position);
  retry_.run("starting", [this] {
    reporter_.open_metrics(run_.directory, state_.metrics_bytes,
                           run_.tensorboard, setup_.device);
  });
  lr_schedule_.total_steps = total_steps_;
  meter_.restart();
  if (setup_.device.is_cpu()) compat::release_cpu_blocks();  // from planning
  reset_process_peak();
  describe_start();
  clock_.start(options.seconds, state_.train_s,
               total_steps_ <= kShortRunWindows);
  if (total_steps_ - state_.step <= kWarmUpWindows) reporter_.begin_training();
  if (state_.evaluation_due && evaluator_.enabled()) evaluate();
}

void TrainLoop::describe_start() {
  if (reporter_.listener() == nullptr) return;
  const TrainOptions& options = setup_.options;
  const std::string ranks = options.ranks > 1
                                ? fmt::format(" × {} ranks", options.ranks)
                                : std::string();
  const bool even = options.global_batch ==
                    options.batch * options.accumulate * options.ranks;
  const std::string total =
      even ? std::string() : fmt::format(" = {}", options.global_batch);
  const std::string plan =
      budget_.planned() ? "; plan: " + describe(*budget_.current()) : "";
  reporter_.started(
      {fmt::format("{}, {} stages, {:.1f} M parameters", setup_.model.name,
                   setup_.model.chain.size(),
                   static_cast<double>(parameter_count(setup_.model)) / 1e6),
       setup_.data.train->description(),
       fmt::format(
           "{} × {}{}{} samples per update, {}, {}, recompute {}, on {}",
           options.batch, options.accumulate, ranks, total,
           optimizer_name(setup_), to_text(options.precision),
           runner_.schedule().name(), setup_.device.str()) +
           (runner_.updates_in_backward() ? ", updated in the backward" : "") +
           (runner_.moves_parameters()
                ? ", parameters and optimizer state in host memory"
            : runner_.host_state_bytes() > 0
                ? ", optimizer state in host memory"
                : "") +
           plan,
       state_.step, total_steps_});
}

}  // namespace reprise::detail
