#include "train/loop/session.h"

#include "compat/cpu_allocator.h"
#include "compat/cuda.h"
#include "compat/cuda_graph.h"
#include "compat/denormals.h"

#include <reprise/memory/meter.h>
#include <reprise/memory/process_memory.h>

#include <fmt/format.h>
#include <torch/cuda.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace reprise::detail {
namespace {

constexpr double kShowEveryS = 0.25;
constexpr int64_t kShortRunWindows = 1000;
constexpr auto kLookEvery = std::chrono::milliseconds(100);

}  // namespace

Session::Session(const TrainConfig& given,
                 std::unique_ptr<BudgetPlanner> planner,
                 const PlanningOptions& planning,
                 std::shared_ptr<RankGroup> group)
    : group_(std::move(group)),
      config_(given),
      device_(check_device(given)),
      host_(host_store_of(given, device_)),
      model_(build_model(given, device_, host_)),
      parameters_(named(model_.root->named_parameters())),
      parameter_list_(values(parameters_)),
      autocast_(autocast_of(given.precision, device_)),
      step_(device_, autocast_, MicroStep::small_of(device_, parameter_list_)),
      train_data_(open_data(given, model_, Split::kTrain)),
      scaler_(scaler_of(given)),
      accumulator_(parameter_list_),
      rate_(rate_of(given)),
      schedule_(schedule_of(given, model_, *train_data_, device_)),
      execution_(make_execution()),
      kept_(parameter_list_),
      ledger_(device_),
      meter_(device_),
      graphs_({.device = device_,
               .mode = given.graph,
               .refusal = shared_channels() > 0
                              ? "with --sync-norm ranks wait for each other "
                                "within the step"
                              : "",
               .parameters = parameter_list_,
               .buffers = model_.root->buffers(),
               .warn = [this](const std::string& text) { warn(text); }}),
      oom_retry_(
          device_, [this](const std::string& text) { warn(text); },
          [this] { graphs_.drop_for_memory(); }),
      window_snapshot_(device_, model_.root->buffers()),
      window_meter_(device_) {
  if (config_.graph != GraphMode::kOn) graphs_.set_limit(config_.memory_limit);
  // Now, so that a missing test split does not end a training hours later.
  if (evaluates()) test_data_ = open_data(config_, model_, Split::kTest);
  if (group_) join_ranks();
  optimizer_ = config_.shard == Sharding::kNone || !group_
                   ? optimizer_of(config_, model_)
                   : make_optimizer(config_.optimizer, reducer_->pieces());
  prepare_ = prepare_of(config_, model_, *train_data_);

  leave_out_dataset();
  ledger_.claim(Category::kData, [this] {
    return std::vector<torch::Tensor>{batch_.inputs, batch_.targets};
  });
  ledger_.claim_model(parameter_list_, model_.root->buffers());
  ledger_.claim(Category::kParameters, [this] {
    return copies_ ? copies_->copies() : std::vector<torch::Tensor>();
  });
  ledger_.claim(Category::kOptimizer, [this] { return optimizer_->held(); });
  ledger_.claim_kept(kept_);
  state_.scaler = scaler_.state();  // its first scale is not the default one
  const compat::FlushDenormals flush(device_);
  const compat::GraphStreamScope stream(device_, graphs_.active());
  // Its copies of the buffers are part of what a plan counts.
  window_snapshot_.remember(state_, samples_here_);
  plan(std::move(planner), planning);
}

CostParts Session::cost_parts() const {
  CostParts parts{config_, device_, model_, parameters_, train_data_, prepare_};
  parts.host = host_;
  parts.dataset_bytes = dataset_bytes_;
  return parts;
}

void Session::leave_out_dataset() {
  for (const auto& data : {train_data_, test_data_}) {
    if (!data) continue;
    const auto tensors = data->tensors();
    dataset_bytes_ += storage_bytes(tensors);
    exclude_from_count(tensors);
  }
}

std::vector<double> Session::window_ms() const {
  std::vector<double> ms;
  for (size_t i = 1; i < window_ends_.size(); ++i) {
    ms.push_back(window_ends_[i].ms_since(window_ends_[i - 1]));
  }
  return ms;
}

TrainResult Session::run(const TrainRun& run) {
  run_ = run;
  if (!group_) return run_all();
  try {
    return run_all();
  } catch (const c10::Error& error) {
    group_->fail(fmt::format("rank {} failed: {}", group_->rank(),
                             error.what_without_backtrace()));
    throw;
  } catch (const std::exception& error) {
    group_->fail(
        fmt::format("rank {} failed: {}", group_->rank(), error.what()));
    throw;
  }
}

TrainResult Session::run_all() {
  const compat::FlushDenormals flush(device_);
  const compat::GraphStreamScope stream(device_, graphs_.active());
  const int64_t window = config_.global_batch;
  total_steps_ =
      config_.steps > 0
          ? config_.steps
          // A short last window counts.
          : config_.epochs * ((train_data_->size() + window - 1) / window);
  start();
  const bool note_times = total_steps_ <= kShortRunWindows;
  if (note_times) window_ends_.emplace_back(device_);
  while (!at_end()) {
    if (!train_window()) break;
    if (note_times) window_ends_.emplace_back(device_);
    look_at_clock();
    if (group_) agree_after_window();
    evaluate_if_due();
    save_if_due();
  }
  return finish();
}

void Session::start() {
  saves_ = run_.directory != nullptr;
  if (group_) {
    saves_ =
        group_->all_reduce_max({run_.directory != nullptr ? 1 : 0}).at(0) > 0;
  }
  if (run_.resume && group_) {
    if (const auto saved = newest()) load(*saved);
  } else if (run_.resume) {
    oom_retry_.run("resuming", [this] {
      if (const auto saved = newest()) load(*saved);
    });
  }
  keep_config();
  open_loader();
  oom_retry_.run("starting", [this] {
    metrics_.emplace(run_.directory, state_.metrics_bytes, run_.tensorboard,
                     run_.listener, device_);
  });
  rate_.total_steps = total_steps_;
  before_s_ = state_.train_s;
  meter_.restart();
  if (device_.is_cpu()) compat::release_cpu_blocks();  // planning's
  reset_process_peak();
  if (run_.listener != nullptr) {
    run_.listener->started(
        {fmt::format("{}, {} stages, {:.1f} M parameters", model_.name,
                     model_.chain.size(),
                     static_cast<double>(parameter_count(model_)) / 1e6),
         train_data_->description(),
         fmt::format(
             "{} × {}{}{} samples an update, {}, {}, recompute {}, on {}",
             config_.batch, config_.accumulate,
             config_.ranks > 1 ? fmt::format(" × {} ranks", config_.ranks)
                               : std::string(),
             config_.global_batch ==
                     config_.batch * config_.accumulate * config_.ranks
                 ? std::string()
                 : fmt::format(" = {}", config_.global_batch),
             config_.optimizer.name, to_text(config_.precision),
             schedule_.name(), device_.str()) +
             (decision_ ? "; plan: " + decision_->text : ""),
         state_.step, total_steps_});
  }
  began_ = last_save_ = last_show_ = look_again_ = Clock::now();
  if (total_steps_ - state_.step <= kWarmUpWindows) {
    running_ = true;
    tell_training(true);
  }
  if (state_.evaluation_due && evaluates()) evaluate();
}

void Session::open_loader() {
  if (loader_) waited_s_ += loader_->waited_s();
  loader_.reset();  // its workers' batches first
  LoaderOptions loading = loading_of(config_, prepare_, device_);
  loading.batch = config_.batch;
  loading.window = config_.global_batch;
  if (group_) {
    loading.share = group_->rank();
    loading.shares = group_->size();
  }
  loader_ = std::make_unique<Loader>(train_data_, loading, state_.position);
}

void Session::note_speed() {
  // A capture takes longer than many steps: the speed counts from after it.
  const bool captured =
      std::exchange(captures_seen_, graphs_.captures()) != graphs_.captures();
  if (windows_ < kWarmUpWindows) return;
  if (windows_ > kWarmUpWindows && !captured) return;
  wait_for_device();
  steady_from_windows_ = windows_;
  steady_from_s_ = seconds();
  steady_from_samples_ = samples_here_;
  audit_.start(seconds(), waited_s_ + loader_->waited_s());
  if (running_) return;
  running_ = true;
  tell_training(true);
}

double Session::samples_per_s() const {
  const bool steady = steady_from_windows_ > 0 &&
                      windows_ >= steady_from_windows_ + kWarmUpWindows;
  const double since = steady ? steady_from_s_ : 0;
  const int64_t from = steady ? steady_from_samples_ : 0;
  return static_cast<double>(samples_here_ - from) /
         std::max(seconds() - since, 1e-9);
}

bool Session::told_to_stop() const {
  return run_.stop && run_.stop();
}

void Session::look_at_clock() {
  // The speed of the first windows is no speed.
  if (config_.seconds <= 0 || steady_from_windows_ == 0 ||
      windows_ < steady_from_windows_ + kWarmUpWindows) {
    return;
  }
  // The host runs ahead of a GPU; to wait after each window would slow it down.
  const auto now = Clock::now();
  if (now < look_again_) return;
  wait_for_device();
  // Half of it at least is for what the speed is taken from: capturing a graph may
  // take longer than all of it.
  const double left_s =
      std::max(config_.seconds - seconds(),
               config_.seconds / 2 - (seconds() - steady_from_s_));
  time_is_up_ = left_s <= 0;
  look_again_ = Clock::now() +
                std::min<Clock::duration>(
                    kLookEvery, std::chrono::duration_cast<Clock::duration>(
                                    std::chrono::duration<double>(left_s)));
}

void Session::tell_training(bool active) {
  if (run_.listener != nullptr && running_) run_.listener->training(active);
}

void Session::show(bool now) {
  const double since =
      std::chrono::duration<double>(Clock::now() - last_show_).count();
  const bool due = now || since >= kShowEveryS;
  if (!due && !metrics_->full()) return;
  oom_retry_.run("fetching the losses", [this] { metrics_->flush(); });
  if (!due) return;
  last_show_ = Clock::now();
  if (run_.listener == nullptr) return;
  const double speed = samples_per_s();
  const double left_samples = static_cast<double>(total_steps_ - state_.step) *
                              static_cast<double>(config_.global_batch);
  double left_s = speed > 0 ? left_samples / speed : 0;
  if (config_.seconds > 0) {
    left_s = std::min(left_s, std::max(0.0, config_.seconds - seconds()));
  }
  run_.listener->stepped({state_.step, config_.seconds > 0 ? 0 : total_steps_,
                          metrics_->last_loss().value_or(0),
                          rate_at(rate_, std::max<int64_t>(state_.step - 1, 0)),
                          speed, meter_.live_bytes() + graphs_.bytes(),
                          peak_bytes(), config_.memory_limit, left_s});
}

int64_t Session::peak_bytes() {
  return std::max(
      {meter_.peak_bytes(), graph_peak_bytes_, graphs_.peak_bytes()});
}

void Session::warn(const std::string& text) {
  if (run_.listener != nullptr) run_.listener->warned(text);
}

void Session::wait_for_device() const {
  if (device_.is_cuda()) compat::cuda_synchronize(device_.index());
}

double Session::seconds() const {
  return std::chrono::duration<double>(Clock::now() - began_).count() -
         aside_s_;
}

}  // namespace reprise::detail
