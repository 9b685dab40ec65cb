#include "compat/cuda.h"
#include "compat/denormals.h"
#include "train/loop/components.h"
#include "train/profile/window_profile.h"

#include <reprise/accumulate/accumulator.h>
#include <reprise/data/loader.h>
#include <reprise/memory/meter.h>
#include <reprise/recompute/stage_costs.h>
#include <reprise/recompute/strategy.h>
#include <reprise/train/profile.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

namespace reprise {
namespace detail {
namespace {

constexpr int kWarmUpUpdates = 2;
constexpr int kMostTries = 32;  // of fp16, whose first scales overflow
constexpr int kTraceRepeats = 3;

/// Divides the time into phases without gaps.
class PhaseLog {
 public:
  explicit PhaseLog(torch::Device device) : device_(device), meter_(device) {}

  /// Ends the phase at hand.
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
    wait();
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
  void wait() const {
    if (device_.is_cuda()) compat::cuda_synchronize(device_.index());
  }

  torch::Device device_;
  MemoryMeter meter_;
  std::vector<TrainingProfile::Phase> phases_;
  std::chrono::steady_clock::time_point start_;
  bool open_ = false;
};

/// Sees where the last stage begins, and hands every operation on.
class PhaseObserver : public ExecutionObserver {
 public:
  PhaseObserver(int last_stage, WindowProfile* next)
      : last_stage_(last_stage), next_(next) {}

  /// Logs into `log` until the next call; null: nowhere.
  void log_into(PhaseLog* log) { log_ = log; }

  void before(const Op& op) override {
    if (log_ != nullptr && is_forward(op.kind) && op.stage == last_stage_) {
      std::exchange(log_, nullptr)->begin("last stage");
    }
    if (next_ != nullptr) next_->before(op);
  }
  void after(const Op& op) override {
    if (next_ != nullptr) next_->after(op);
  }

 private:
  int last_stage_;
  WindowProfile* next_;
  PhaseLog* log_ = nullptr;
};

class Profiler {
 public:
  explicit Profiler(const TrainConfig& config)
      : config_(config),
        device_(check_device(config)),
        log_(device_),
        model_(logged_model()),
        data_(logged_data()),
        parameters_(named(model_.root->named_parameters())),
        parameter_list_(values(parameters_)),
        autocast_(autocast_of(config.precision, device_)),
        prepare_(prepare_of(config, model_, *data_)),
        optimizer_(optimizer_of(config, model_)),
        scaler_(scaler_of(config)),
        accumulator_(parameter_list_),
        schedule_(schedule_of(config, model_, *data_, device_)),
        kept_(parameter_list_),
        ledger_(device_) {
    loading_.batch = config.batch;
    loading_.window = config.global_batch;
    loading_.seed = config.seed;
    loading_.workers = 0;
    loading_.pin = device_.is_cuda();
    claim_memory();
  }

  TrainingProfile run() {
    const compat::FlushDenormals flush(device_);
    // The phase "data" shows the dataset; no training needs it to be resident.
    log_.end();
    exclude_from_count(data_->tensors());
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
    look(result);
    // Looking takes time of its own; the window before shows what it really is.
    const size_t first = result.phases.size() - timed.size();
    for (size_t i = 0; i < timed.size(); ++i) {
      result.phases[first + i].ms = timed[i].ms;
    }
    add_stages(result);
    return result;
  }

 private:
  Model logged_model() {
    log_.begin("model");
    return build_model(config_, device_, host_store_of(config_, device_));
  }

  std::shared_ptr<const Dataset> logged_data() {
    log_.begin("data");
    return open_data(config_, model_, Split::kTrain);
  }

  void claim_memory() {
    ledger_.claim(Category::kData, [this] {
      return std::vector<torch::Tensor>{batch_.inputs, batch_.targets};
    });
    ledger_.claim_model(parameter_list_, model_.root->buffers());
    ledger_.claim(Category::kParameters, [this] {
      return copies_ ? copies_->copies() : std::vector<torch::Tensor>();
    });
    ledger_.claim(Category::kOptimizer, [this] { return optimizer_->held(); });
    ledger_.claim_kept(kept_);
  }

  /// A window that was skipped, since its gradient overflowed, shows nothing.
  template <class Window>
  void updated_window(Window&& window) {
    for (int i = 0; i < kMostTries; ++i) {
      if (window()) return;
    }
    TORCH_CHECK(false, "[profile] expected finite gradients, got none in ",
                kMostTries, " updates; try a smaller --loss-scale");
  }

  bool plain_window(PhaseLog* log) {
    PhaseObserver observer(model_.chain.size() - 1, nullptr);
    Execution execution(model_.chain, schedule_,
                        ExecutionOptions{.observer = &observer});
    return train_window(execution, observer, log, nullptr);
  }

  void look(TrainingProfile& result) {
    std::optional<WindowProfile> profile;
    std::vector<TrainingProfile::Phase> phases;
    updated_window([&] {
      PhaseLog log(device_);
      profile.emplace(device_, ledger_, kept_);
      PhaseObserver observer(model_.chain.size() - 1, &*profile);
      Execution execution(
          model_.chain, schedule_,
          ExecutionOptions{
              .meter = &kept_, .observer = &observer, .separate_graphs = true});
      const bool updated = train_window(execution, observer, &log, &*profile);
      phases = log.take();
      return updated;
    });
    result.phases.insert(result.phases.end(), phases.begin(), phases.end());
    result.peak_bytes = profile->peak_bytes();
    result.kept_bytes = profile->kept_bytes();
    result.peak_phase = profile->phase();
    if (profile->stage() >= 0) {
      result.peak_stage = model_.chain[profile->stage()].name();
    }
    result.memory = profile->memory();
  }

  /// True where it ended with an update.
  bool train_window(Execution& execution, PhaseObserver& observer,
                    PhaseLog* log, WindowProfile* profile) {
    if (log != nullptr) log->begin("batch");
    if (copies_) {
      copies_->refresh();
    } else {
      copies_ = weight_copies_of(config_, config_.precision, model_, device_);
    }
    // From the first sample each time: windows at an epoch's end may be short.
    std::optional<Loader> loader;
    loader.emplace(data_, loading_);
    const int64_t batches =
        std::min(config_.accumulate, loader->batches_left());
    accumulator_.begin(static_cast<double>(loader->count_ahead(batches)));
    for (int64_t i = 0; i < batches; ++i) {
      if (log != nullptr && i == 1) log->begin("other micro-batches");
      take_batch(*loader, profile);
      train_batch(execution, observer, i == 0 ? log : nullptr, profile);
    }
    if (log != nullptr) log->begin("update");
    const bool updated = update(profile);
    loader.reset();
    if (log != nullptr) log->end();
    return updated;
  }

  void take_batch(Loader& loader, WindowProfile* profile) {
    if (profile != nullptr) profile->begin("data");
    auto batch = loader.next();
    TORCH_INTERNAL_ASSERT(batch.has_value());
    batch_ = std::move(*batch);
    move_to(batch_, device_);
    prepare(batch_, prepare_);
    if (profile != nullptr) profile->end();
  }

  void train_batch(Execution& execution, PhaseObserver& observer, PhaseLog* log,
                   WindowProfile* profile) {
    const double weight =
        accumulator_.weigh(static_cast<double>(batch_.count)) * scaler_.scale();
    observer.log_into(log);
    if (log != nullptr) log->begin("forward");
    Tensors outputs;
    {
      const compat::AutocastGuard autocast(autocast_);
      outputs = execution.forward({batch_.inputs, batch_.targets});
    }
    if (profile != nullptr) profile->forward_done();
    if (profile != nullptr && log != nullptr) {
      kept_by_stage_ = kept_.live_by_stage();
    }
    if (log != nullptr) log->begin("backward");
    Tensors gradients(1);
    gradients[0] = torch::full_like(outputs[0], weight);
    execution.backward(std::move(gradients));
  }

  bool update(WindowProfile* profile) {
    if (profile != nullptr) profile->begin("update");
    const bool finite = scaler_.unscale(parameter_list_);
    if (finite && config_.clip > 0) accumulator_.clip(config_.clip);
    accumulator_.update([&] {
      if (copies_) copies_->expire();
      if (finite) optimizer_->step(/*lr=*/0);
    });
    scaler_.update();
    if (profile != nullptr) profile->end();
    batch_ = {};
    return finite;
  }

  TrainingProfile described() const {
    TrainingProfile result;
    result.model = model_.name;
    result.data = config_.data;
    result.device = device_.str();
    result.precision = to_text(config_.precision);
    result.optimizer = config_.optimizer.name;
    result.recompute = schedule_.name();
    result.parameters = parameter_count(model_);
    result.micro_batch = config_.batch;
    result.accumulate = config_.accumulate;
    result.dataset_bytes = storage_bytes(data_->tensors());
    return result;
  }

  void add_stages(TrainingProfile& result) {
    Loader loader(data_, loading_);
    take_batch(loader, nullptr);
    const compat::AutocastGuard autocast(autocast_);
    const ChainCosts figures = measure_stage_costs(
        model_.chain, {batch_.inputs, batch_.targets}, kTraceRepeats);
    batch_ = {};
    kept_by_stage_.resize(figures.stages.size());
    for (size_t i = 0; i < figures.stages.size(); ++i) {
      const StageCosts& stage = figures.stages[i];
      int64_t output = 0;
      for (const auto& buffer : stage.outputs) {
        if (buffer.input < 0) output += buffer.bytes;
      }
      result.stages.push_back({model_.chain[static_cast<int>(i)].name(), output,
                               kept_by_stage_[i], stage.keep_extra_bytes,
                               stage.backward_extra_bytes, stage.forward_ms,
                               stage.backward_ms});
    }
  }

  const TrainConfig config_;
  torch::Device device_;
  PhaseLog log_;
  Model model_;
  std::shared_ptr<const Dataset> data_;
  NamedTensors parameters_;
  std::vector<torch::Tensor> parameter_list_;
  compat::AutocastState autocast_;
  PrepareOptions prepare_;
  LoaderOptions loading_;
  std::unique_ptr<Optimizer> optimizer_;
  GradScaler scaler_;
  Accumulator accumulator_;
  std::unique_ptr<WeightCopies> copies_;  // null: not wanted, or not there yet
  Schedule schedule_;
  KeptMeter kept_;
  Batch batch_;  // the one in work, for the ledger
  MemoryLedger ledger_;
  std::vector<int64_t> kept_by_stage_;  // of the window's first micro-batch
};

}  // namespace
}  // namespace detail

TrainingProfile profile_training(const TrainConfig& config) {
  return detail::Profiler(config).run();
}

}  // namespace reprise
