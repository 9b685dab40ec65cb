#include "compat/cuda.h"
#include "compat/denormals.h"
#include "train/budget/device_settings.h"
#include "train/profile/claim_memory.h"
#include "train/profile/step_time.h"
#include "train/profile/window_profile.h"
#include "train/step/batch_source.h"
#include "train/step/gradients.h"
#include "train/step/ranks.h"
#include "train/step/step_graphs.h"
#include "train/step/step_runner.h"
#include "train/step/train_setup.h"
#include "train/step/window_exchange.h"

#include <reprise/memory/meter.h>
#include <reprise/recompute/stage_costs.h>
#include <reprise/recompute/strategy.h>
#include <reprise/train/profile.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

namespace reprise {
namespace detail {
namespace {

constexpr int kWarmUpUpdates = 2;
constexpr int kMostTries = 32;  // windows; the first scales of fp16 overflow
constexpr int kCostRepeats = 3;

/// Records consecutive phases.
class PhaseLog {
 public:
  explicit PhaseLog(torch::Device device) : device_(device), meter_(device) {}

  /// Ends the current phase and begins the next one.
  void begin(std::string name) {
    end();
    meter_.restart();
    phases_.emplace_back();
    phases_.back().name = std::move(name);
    phases_.back().before_bytes = meter_.start_bytes();
    start_ = std::chrono::steady_clock::now();
    open_ = true;
  }

  void end() {
    compat::synchronize(device_);
    if (!std::exchange(open_, false)) return;
    auto& phase = phases_.back();
    phase.ms = std::chrono::duration<double, std::milli>(
                   std::chrono::steady_clock::now() - start_)
                   .count();
    phase.after_bytes = meter_.live_bytes();
    phase.peak_bytes = meter_.peak_bytes();
  }

  std::vector<TrainingProfile::Phase> take() { return std::move(phases_); }

 private:
  torch::Device device_;
  MemoryMeter meter_;
  std::vector<TrainingProfile::Phase> phases_;
  std::chrono::steady_clock::time_point start_;
  bool open_ = false;
};

/// Detects the beginning of the last stage, and forwards all operations.
class PhaseObserver : public ExecutionObserver {
 public:
  PhaseObserver(int last_stage, WindowProfile* next)
      : last_stage_(last_stage), next_(next) {}

  /// Sets the log, which is not owned; null disables logging.
  void log_into(PhaseLog* log) { log_ = log; }
  /// Sets a function that is called once, after the forward of the last stage.
  void on_forward_done(std::function<void()> call) {
    forward_done_ = std::move(call);
  }

  void before(const Op& op) override {
    if (log_ != nullptr && is_forward(op.kind) && op.stage == last_stage_) {
      std::exchange(log_, nullptr)->begin("last stage");
    }
    if (next_ != nullptr) next_->before(op);
  }
  void after(const Op& op) override {
    if (next_ != nullptr) next_->after(op);
    if (forward_done_ && is_forward(op.kind) && op.stage == last_stage_) {
      std::exchange(forward_done_, nullptr)();
    }
  }

 private:
  int last_stage_;
  WindowProfile* next_;
  PhaseLog* log_ = nullptr;
  std::function<void()> forward_done_;
};

class Profiler {
 public:
  explicit Profiler(const TrainConfig& config)
      : device_(check_device(config)),
        log_(device_),
        setup_(logged_setup(config)),
        ranks_(make_ranks(nullptr)),
        exchange_(make_window_exchange(*ranks_, setup_)),
        runner_(setup_, *exchange_, schedule_of(setup_),
                {.graph = GraphMode::kOff}),
        source_(setup_, *ranks_),
        gradients_(setup_, *ranks_, *exchange_),
        optimizer_(measured_optimizer_of(setup_)),
        kept_(setup_.parameter_list),
        ledger_(device_) {
    claim_memory(ledger_, setup_, source_, runner_, *optimizer_, kept_);
  }

  TrainingProfile run() {
    const compat::FlushDenormals flush(device_);
    log_.begin("optimizer state");
    for (int i = 0; i < kWarmUpUpdates; ++i) {
      updated_window([this] { return plain_window(nullptr); });
    }
    std::vector<TrainingProfile::Phase> timed;
    updated_window([&] {
      PhaseLog log(device_);
      const bool updated = plain_window(&log);
      timed = log.take();
      return updated;
    });
    TrainingProfile result = described();
    log_.end();
    result.phases = log_.take();
    observe(result);
    // Observation takes time, so take the times from the window before.
    const size_t first = result.phases.size() - timed.size();
    for (size_t i = 0; i < timed.size(); ++i) {
      result.phases[first + i].ms = timed[i].ms;
    }
    add_stages(result);
    return result;
  }

  /// Returns model and data, and options with the schedule and the loss scale
  /// that were profiled, to train the same windows with a Trainer.
  const TrainInputs& inputs() const { return *inputs_; }
  TrainConfig options(TrainConfig config) const {
    config.recompute = runner_.schedule().to_text();
    config.layout = setup_.options.layout;
    config.autotune = setup_.options.autotune;
    config.loss_scale = gradients_.scaler().scale();
    return config;
  }

 private:
  TrainSetup logged_setup(const TrainConfig& config) {
    log_.begin("model");
    TrainInputs inputs{make_train_model(config), {}};
    inputs_ = inputs;  // shares the modules
    PlacedOnHost host = place_model(inputs.model, config, device_);
    log_.begin("data");
    inputs.data = open_train_data(config, inputs.model);
    inputs_->data = inputs.data;
    // Count the dataset in the phase "data" only.
    log_.end();
    TrainSetup setup =
        assemble_setup(std::move(inputs), config, device_, std::move(host));
    const auto alone = make_ranks(nullptr);
    settle_device_settings(setup, *alone, {.memory = config.memory_limit});
    // Do not read ahead, so that each phase shows its own memory.
    setup.options.workers = 0;
    return setup;
  }

  /// Runs `window` until it ends with an update, that is, its gradients do not
  /// overflow.
  template <class Window>
  void updated_window(Window&& window) {
    for (int i = 0; i < kMostTries; ++i) {
      if (window()) return;
    }
    TORCH_CHECK(false, "[profile] expected finite gradients, got none in ",
                kMostTries, " updates; try a smaller --loss-scale");
  }

  bool plain_window(PhaseLog* log) {
    PhaseObserver observer(setup_.model.chain.size() - 1, nullptr);
    runner_.observe(observer, nullptr, /*separate_graphs=*/false);
    const bool updated = train_window(observer, log, nullptr);
    runner_.unobserve();
    return updated;
  }

  void observe(TrainingProfile& result) {
    std::optional<WindowProfile> profile;
    std::vector<TrainingProfile::Phase> phases;
    updated_window([&] {
      PhaseLog log(device_);
      profile.emplace(device_, ledger_, kept_);
      PhaseObserver observer(setup_.model.chain.size() - 1, &*profile);
      runner_.observe(observer, &kept_, /*separate_graphs=*/true);
      const bool updated = train_window(observer, &log, &*profile);
      runner_.unobserve();
      phases = log.take();
      return updated;
    });
    result.phases.insert(result.phases.end(), phases.begin(), phases.end());
    result.peak_bytes = profile->peak_bytes();
    result.kept_bytes = profile->kept_bytes();
    kept_by_stage_ = profile->kept_by_stage();
    result.peak_phase = profile->phase();
    if (profile->stage() >= 0) {
      result.peak_stage = setup_.model.chain[profile->stage()].name();
    }
    result.memory = profile->memory();
  }

  /// Returns whether the window ended with an update.
  bool train_window(PhaseObserver& observer, PhaseLog* log,
                    WindowProfile* profile) {
    if (log != nullptr) log->begin("batch");
    runner_.refresh_weight_copies();
    // Start at the first sample, because the last window of an epoch may be
    // short.
    source_.open({});
    const Loader::Window window = source_.window_ahead();
    gradients_.begin(static_cast<double>(window.total_count),
                     static_cast<double>(window.total_count));
    for (int64_t i = 0; !gradients_.complete(); ++i) {
      if (log != nullptr && i == 1) log->begin("other micro-batches");
      if (profile != nullptr) profile->begin("data");
      const Batch& batch = source_.next();
      if (profile != nullptr) profile->end();
      if (batch.count == 0) continue;  // as in a training
      PhaseLog* first = i == 0 ? log : nullptr;
      observer.log_into(first);
      if (first != nullptr) first->begin("forward");
      observer.on_forward_done([first] {
        if (first != nullptr) first->begin("backward");
      });
      runner_.run(batch,
                  {.weight = gradients_.weigh(static_cast<double>(batch.count)),
                   .profile = profile});
    }
    if (log != nullptr) log->begin("update");
    const bool updated = update(profile);
    source_.close();
    if (log != nullptr) log->end();
    return updated;
  }

  bool update(WindowProfile* profile) {
    if (profile != nullptr) profile->begin("update");
    const auto ready = gradients_.make_ready(
        [](const std::function<void()>& part) { part(); }, [] {});
    runner_.expire_weight_copies();
    gradients_.update(ready.finite, [this] { optimizer_->step(/*lr=*/0); });
    if (profile != nullptr) profile->end();
    source_.release();
    return ready.finite;
  }

  TrainingProfile described() const {
    const TrainOptions& options = setup_.options;
    TrainingProfile result;
    result.model = setup_.model.name;
    result.data = setup_.data.name;
    result.device = device_.str();
    result.precision = to_text(options.precision);
    result.optimizer = options.optimizer.name;
    result.recompute = runner_.schedule().name();
    result.parameters = parameter_count(setup_.model);
    result.micro_batch = options.batch;
    result.accumulate = options.accumulate;
    result.dataset_bytes = storage_bytes(setup_.data.train->tensors());
    return result;
  }

  void add_stages(TrainingProfile& result) {
    source_.open({});
    const Batch& batch = source_.next();
    const compat::AutocastGuard autocast(setup_.autocast);
    const ChainCosts costs =
        measure_stage_costs(setup_.model.chain, batch.tensors, kCostRepeats);
    source_.release();
    kept_by_stage_.resize(costs.stages.size());
    for (size_t i = 0; i < costs.stages.size(); ++i) {
      const StageCosts& stage = costs.stages[i];
      int64_t output = 0;
      for (const auto& buffer : stage.outputs) {
        if (buffer.input < 0) output += buffer.bytes;
      }
      result.stages.push_back(
          {setup_.model.chain[static_cast<int>(i)].name(), output,
           kept_by_stage_[i], stage.keep_extra_bytes,
           stage.backward_extra_bytes, stage.forward_ms, stage.backward_ms});
    }
  }

  torch::Device device_;
  PhaseLog log_;
  std::optional<TrainInputs> inputs_;  // as a Trainer takes them
  TrainSetup setup_;
  std::unique_ptr<Ranks> ranks_;
  std::unique_ptr<WindowExchange> exchange_;
  StepRunner runner_;
  BatchSource source_;
  Gradients gradients_;
  std::unique_ptr<Optimizer> optimizer_;
  KeptMeter kept_;
  MemoryLedger ledger_;
  std::vector<int64_t> kept_by_stage_;  // in the first micro-batch of a window
};

}  // namespace
}  // namespace detail

double TrainingProfile::phases_ms() const {
  double ms = 0;
  for (size_t i = kSetupPhases; i < phases.size(); ++i) ms += phases[i].ms;
  return ms;
}

TrainingProfile profile_training(const TrainConfig& config) {
  TORCH_CHECK(config.state != StatePlace::kHostAll,
              "[--state] host-all: a profile has its phases one after another, "
              "got a training whose backward updates the parameters; use "
              "--state device or host");
  // Throws if a CUDA graph is required but not possible, before minutes are
  // spent on the phases.
  detail::StepGraphs(
      {.device = detail::check_device(config), .mode = config.graph});
  std::optional<detail::Profiler> profiler(std::in_place, config);
  TrainingProfile profile = profiler->run();
  TrainInputs inputs = profiler->inputs();
  const TrainConfig options = profiler->options(config);
  profiler.reset();  // the Trainer has optimizer and weight copies of its own
  const detail::StepTime step =
      detail::time_step(std::move(inputs), options, profile.phases_ms());
  profile.step_ms = step.ms;
  profile.graph = step.graph;
  return profile;
}

}  // namespace reprise
