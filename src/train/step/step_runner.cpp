#include "train/step/step_runner.h"

#include "compat/cuda.h"
#include "compat/side_stream.h"
#include "plan/update_cuts.h"
#include "train/config/update_refusal.h"
#include "train/step/oom_retry.h"

#include <reprise/recompute/strategy.h>

#include <fmt/format.h>

#include <numeric>
#include <utility>

namespace reprise::detail {
namespace {

constexpr const char* kNormsWait =
    "with --sync-norm ranks wait for each other within the step";

}  // namespace

StepRunner::StepRunner(const TrainSetup& setup, WindowExchange& exchange,
                       Schedule schedule, Options options)
    : setup_(setup),
      exchange_(exchange),
      schedule_(std::move(schedule)),
      visits_(stage_visits(schedule_)),
      optimizer_(options.optimizer),
      warn_(options.warn),
      micro_step_(setup.device, setup.autocast,
                  MicroStep::small_of(setup.device, setup.parameter_list,
                                      /*copies=*/nullptr)),
      graphs_({.device = setup.device,
               .mode = std::move(options.graph),
               .refusal = exchange.syncs_norms() ? kNormsWait : "",
               .parameters = setup.parameter_list,
               .buffers = setup.model.root->buffers(),
               .warn = std::move(options.warn)}),
      execution_(make_execution()),
      start_(setup.device, setup.model.root->buffers()) {
  if (setup.options.gradients == GradientSums::kBf16) {
    half_gradients_ =
        std::make_unique<HalfGradients>(trained_by_first_stage(setup.model));
    execution_ = make_execution();
  }
  set_update(options.update);
  graphs_.set_refusal(capture_refusal());
}

Execution StepRunner::make_execution() const {
  ExecutionOptions options;
  attach(options, /*cuts=*/true);
  return Execution(setup_.model.chain, schedule_, std::move(options));
}

void StepRunner::attach(ExecutionOptions& options, bool cuts) const {
  exchange_.attach(options, cuts);
  if (update_) update_->attach(options);
  if (setup_.host_parameters && setup_.host_parameters->on_host()) {
    options.brings_gradient = [host = setup_.host_parameters](const auto& p) {
      return host->moves(p);
    };
  }
  if (half_gradients_) {
    // Before an update, sums are added to the gradients.
    options.cuts = update_cuts(final_gradient_bytes(setup_));
    options.final_from = [this,
                          update = std::move(options.final_from)](int stage) {
      const auto add = [&] { half_gradients_->final_from(stage); };
      if (half_updated()) {
        repeat_part(setup_.device, add, [] {});
      } else {
        add();
      }
      if (update) update(stage);
    };
  }
  if (StageParameters* const moving = moving_parameters(setup_)) {
    options.memory = moving;
    options.cuts = moving->cuts();
  }
}

bool StepRunner::moves_parameters() const {
  return setup_.host_parameters && setup_.host_parameters->on_host();
}

void StepRunner::set_update(UpdateMode update) {
  const bool in_backward = update == UpdateMode::kBackward;
  if (in_backward == updates_in_backward()) return;
  update_.reset();
  if (in_backward) {
    TORCH_INTERNAL_ASSERT(optimizer_ != nullptr);
    update_ = std::make_unique<BackwardUpdate>(setup_, *optimizer_);
    const auto bytes = final_gradient_bytes(setup_);
    most_held_bytes_ = most_held_bytes(
        std::accumulate(bytes.begin(), bytes.end(), int64_t{0}));
  }
  execution_ = make_execution();
  graphs_.set_refusal(capture_refusal());
}

std::string StepRunner::capture_refusal() const {
  if (exchange_.syncs_norms()) return kNormsWait;
  if (setup_.sharded) {
    return "with --shard parameters, ranks gather parameters while stages run";
  }
  if (moves_parameters()) {
    return "with --state host-all, parameters are copied to the device while "
           "stages run";
  }
  if (half_gradients_) {
    return "with --gradients bf16, gradients are rounded in each micro-batch";
  }
  return update_ ? update_->capture_refusal() : "";
}

bool StepRunner::set_state(StatePlace place, bool accumulate) {
  const bool all = place == StatePlace::kHostAll;
  bool done = move_parameters(all);
  if (done && all && accumulate && setup_.host_parameters &&
      !setup_.host_parameters->reserve_gradients()) {
    warn_of_place("gradients", /*host=*/true, "the host gives no memory");
    done = false;
  }
  // Trials of other plans may have reserved it.
  if (!accumulate && setup_.host_parameters) {
    setup_.host_parameters->release_gradients();
  }
  done = move_optimizer_state(state_on_host(place)) && done;
  graphs_.set_refusal(capture_refusal());
  return done;
}

void StepRunner::warn_of_place(const char* what, bool host,
                               const std::string& why) const {
  if (!warn_) return;
  warn_(fmt::format("the {} stay{} {}: {}", what,
                    std::string_view(what).ends_with('s') ? "" : "s",
                    host ? "on the device" : "in host memory", why));
}

bool StepRunner::move_parameters(bool host) {
  bool done = true;
  if (moves_parameters() != host && setup_.host_parameters) {
    drop_weight_copies();
    HostParameters& parameters = *setup_.host_parameters;
    const auto failure = out_of_memory_in([&] {
      if (host) {
        done = parameters.move_to_host();
      } else {
        parameters.move_to_device();
      }
    });
    done = done && !failure;
    if (!done) {
      warn_of_place("parameters", host,
                    failure.value_or("the host gives no memory for them"));
    }
    graphs_.drop();
  }
  // The cuts of the autograd graph depend on the place.
  execution_ = make_execution();
  return done;
}

bool StepRunner::move_optimizer_state(bool host) {
  if (host == (host_state_bytes() > 0)) return true;
  TORCH_INTERNAL_ASSERT(optimizer_ != nullptr);
  const auto failure = host ? move_state_to_host(*optimizer_, setup_)
                            : out_of_memory_in([this] {
                                dynamic_cast<PartialOptimizer&>(*optimizer_)
                                    .move_state(nullptr, 1);
                              }).value_or("");
  if (!failure.empty()) {
    warn_of_place("optimizer's state", host, failure);
    return false;
  }
  graphs_.drop();
  return true;
}

int64_t StepRunner::host_state_bytes() const {
  const auto* partial = dynamic_cast<const PartialOptimizer*>(optimizer_);
  return partial != nullptr ? partial->host_state_bytes() : 0;
}

void StepRunner::finish_update() {
  TORCH_INTERNAL_ASSERT(update_ != nullptr);
  update_->finish();
}

void StepRunner::set_schedule(Schedule schedule) {
  schedule_ = std::move(schedule);
  visits_ = stage_visits(schedule_);
  execution_ = make_execution();
  graphs_.drop();
}

void StepRunner::refresh_weight_copies() {
  if (copies_) {
    copies_->refresh();
  } else {
    copies_ = weight_copies_of(setup_, setup_.options.precision);
    assign_gradients();
  }
}

void StepRunner::expire_weight_copies(bool keep_split) {
  if (!copies_) return;
  if (keep_split) {
    copies_->expire_for_update();
  } else {
    copies_->expire();
  }
}

void StepRunner::restore_weights() {
  if (copies_) copies_->restore();
}

void StepRunner::drop_weight_copies() {
  if (!copies_) return;
  graphs_.clear();
  copies_.reset();
  assign_gradients();
}

void StepRunner::assign_gradients() {
  micro_step_.set_small(
      MicroStep::small_of(setup_.device, setup_.parameter_list, copies_.get()));
}

std::vector<torch::Tensor> StepRunner::weight_copies() const {
  return copies_ ? copies_->copies() : std::vector<torch::Tensor>();
}

void StepRunner::observe(ExecutionObserver& observer, const KeptMeter* kept,
                         bool separate_graphs) {
  ExecutionOptions options{
      .meter = kept, .observer = &observer, .separate_graphs = separate_graphs};
  attach(options, /*cuts=*/false);
  observed_.emplace(setup_.model.chain, schedule_, std::move(options));
}

void StepRunner::run(const Batch& batch, const Run& how) {
  micro_step_.set_weight(how.weight);
  const Tensors& inputs = batch.tensors;
  const compat::CaptureExpected capture(graphs_.active());
  const bool updates = update_ && how.update_lr;
  if (updates) {
    update_->set_beside(moves_parameters());
    update_->begin(*how.update_lr, how.profile != nullptr);
  } else if (update_) {
    update_->suspend();
  }
  if (half_gradients_) half_gradients_->begin(how.seed, updates);
  if (observed_ || !how.allow_graph || (update_ && !updates)) {
    graphs_.see(inputs);
  } else if (graphs_.run(inputs, [this](const Tensors& recorded) {
               run_recorded(recorded);
             })) {
    if (updates) update_->note_replay();
    return;
  } else if (updates) {
    update_->forget_captured();
  }
  const WindowExchange::MicroBatch scope(exchange_, how.last);
  Execution& execution = observed_ ? *observed_ : execution_;
  compat::WorkLane* const lane = updates ? update_->lane() : nullptr;
  MicroStep::Run step{how.profile, /*final_on_the_way=*/scope.reduces() ||
                                       updates || half_gradients_ != nullptr};
  if (updates) {
    start_.remember_tensors();
    execution.allow_continuing(most_held_bytes_);
    step.recover = [&](const std::string& failure) {
      return continue_backward(execution, inputs, lane, failure);
    };
  }
  run_operations(execution, inputs, std::move(step), lane);
}

bool StepRunner::continue_backward(Execution& execution, const Tensors& inputs,
                                   compat::WorkLane* lane,
                                   std::string failure) {
  if (!half_updated()) return false;
  // The forward was complete; what it has changed stays.
  WindowSnapshot reached(setup_.device, setup_.model.root->buffers());
  reached.remember_tensors();
  StageParameters* const moving = moving_parameters(setup_);
  bool done = false;
  for (int attempt = 1; attempt < OomRetry::kMaxFailures; ++attempt) {
    const int left = execution.stages_left();
    if (!done && left == 0) return false;
    if (lane != nullptr) lane->join(0);
    if (moving != nullptr && !done) moving->abandon();
    if (setup_.device.is_cuda()) compat::empty_cuda_cache();
    const auto error = out_of_memory_in([&] {
      if (!done) {
        const Schedule schedule =
            make_schedule(attempt == 1 ? "all" : "revolve:1", left);
        if (warn_) {
          warn_(fmt::format(
              "the backward ran out of memory: {}; continues with the first {} "
              "of {} stages, recompute {}",
              failure, left, setup_.model.chain.size(), schedule.name()));
        }
        continued_ = true;
        start_.restore();
        if (moving != nullptr) moving->begin(stage_visits(schedule), lane);
        {
          const compat::AutocastGuard autocast(setup_.autocast);
          execution.rerun_forward(inputs, schedule);
        }
        execution.continue_backward();
        done = true;
      }
      reached.restore();
    });
    if (!error) return true;
    failure = *error;
  }
  return false;
}

void StepRunner::run_operations(Execution& execution, const Tensors& inputs,
                                MicroStep::Run how, compat::WorkLane* lane) {
  StageParameters* const moving = moving_parameters(setup_);
  if (moving == nullptr) return micro_step_.run(execution, inputs, how);
  how.final_on_the_way = true;
  moving->begin(visits_, lane);
  try {
    micro_step_.run(execution, inputs, how);
    moving->end();
  } catch (...) {
    moving->abandon();
    throw;
  }
}

void StepRunner::run_recorded(const Tensors& batch) {
  const BackwardUpdate::Captured captured(update_.get());
  micro_step_.run(execution_, batch,
                  {nullptr, /*final_on_the_way=*/update_ != nullptr});
  if (update_) update_->check_recorded();
}

void StepRunner::run_empty(const Batch& batch) {
  const WindowExchange::MicroBatch scope(exchange_, /*last=*/true,
                                         /*counts=*/false);
  micro_step_.set_weight(0);
  run_operations(execution_, batch.tensors,
                 {nullptr, scope.reduces(), /*counts=*/false},
                 /*lane=*/nullptr);
}

Tensors StepRunner::forward(const Batch& batch) {
  const compat::AutocastGuard autocast(setup_.autocast);
  return execution_.forward(batch.tensors);
}

}  // namespace reprise::detail
