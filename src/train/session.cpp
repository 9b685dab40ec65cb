#include "session.h"

#include <reprise/memory/process.h>
#include <reprise/torch/cuda.h>

#include <fmt/format.h>
#include <torch/cuda.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace reprise::train_detail {
namespace {

constexpr double kShowEveryS = 0.25;
constexpr int64_t kShortRunWindows = 1000;

}  // namespace

Session::Session(const TrainConfig& given)
    : config_(given),
      device_(check_device(given)),
      model_(build_model(given, device_)),
      parameters_(named(model_.root->named_parameters())),
      parameter_list_(values(parameters_)),
      autocast_(autocast_of(given.precision, device_)),
      scaler_(scaler_of(given)),
      accumulator_(parameter_list_),
      rate_(rate_of(given)),
      schedule_(make_schedule(given.recompute, model_.chain.size())),
      execution_(model_.chain, schedule_),
      kept_(parameter_list_),
      ledger_(device_),
      meter_(device_) {
  train_data_ = open_data(config_, model_, Split::kTrain);
  // Now, so that a missing test split does not end a training hours later.
  if (evaluates()) test_data_ = open_data(config_, model_, Split::kTest);
  optimizer_ = make_optimizer(config_.optimizer, parameters_);
  prepare_ = prepare_of(model_, *train_data_);

  ledger_.claim(Category::kData, [this] {
    auto list = train_data_->tensors();
    if (test_data_) {
      for (auto& tensor : test_data_->tensors()) list.push_back(tensor);
    }
    list.push_back(batch_.inputs);
    list.push_back(batch_.targets);
    return list;
  });
  ledger_.claim_model(parameter_list_, model_.root->buffers());
  ledger_.claim(Category::kOptimizer, [this] { return held_by(*optimizer_); });
  ledger_.claim_kept(kept_);
}

CostParts Session::cost_parts() const {
  CostParts parts{config_, device_, model_, parameters_, train_data_, prepare_};
  if (device_.is_cpu()) {
    parts.dataset_bytes = storage_bytes(train_data_->tensors());
    if (test_data_) parts.dataset_bytes += storage_bytes(test_data_->tensors());
  }
  return parts;
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
  const int64_t window = config_.global_batch;
  total_steps_ =
      config_.steps > 0
          ? config_.steps
          // A short last window counts.
          : config_.epochs * ((train_data_->size() + window - 1) / window);
  start();
  const bool note_times = total_steps_ <= kShortRunWindows;
  if (note_times) window_ends_.emplace_back(device_);
  while (state_.step < total_steps_) {
    if (!train_window()) break;
    if (note_times) window_ends_.emplace_back(device_);
    evaluate_if_due();
    save_if_due();
  }
  return finish();
}

void Session::start() {
  if (run_.resume) {
    TORCH_INTERNAL_ASSERT(run_.directory != nullptr);
    const auto saved = run_.directory->newest(
        [this](const std::string& text) { warn("passed over: " + text); });
    if (saved) load(*saved);
  }
  LoaderOptions loading;
  loading.batch = config_.batch;
  loading.window = config_.global_batch;
  loading.seed = config_.seed;
  loading.workers = config_.workers;
  loading.pin = device_.is_cuda();
  if (config_.resize == "workers") {
    loading.transform = [options = prepare_](Batch& batch) {
      prepare(batch, options);
    };
  }
  loader_ = std::make_unique<Loader>(train_data_, loading, state_.position);
  metrics_.emplace(run_.directory, state_.metrics_bytes, run_.tensorboard,
                   run_.listener);
  rate_.total_steps = total_steps_;
  before_s_ = state_.train_s;
  meter_.restart();
  reset_process_peak();
  if (run_.listener != nullptr) {
    run_.listener->started(
        {fmt::format("{}, {} stages, {:.1f} M parameters", model_.name,
                     model_.chain.size(),
                     static_cast<double>(parameter_count(model_)) / 1e6),
         train_data_->description(),
         fmt::format("{} × {}{} samples an update, {}, {}, recompute {}, on {}",
                     config_.batch, config_.accumulate,
                     config_.global_batch % config_.batch == 0
                         ? std::string()
                         : fmt::format(" = {}", config_.global_batch),
                     config_.optimizer.name, config_.precision,
                     schedule_.name(), device_.str()),
         state_.step, total_steps_});
  }
  began_ = last_save_ = last_show_ = Clock::now();
  if (state_.evaluation_due && evaluates()) evaluate();
}

bool Session::train_window() {
  // The second window shows what all later ones do: by then the optimizer has
  // its state_. Where there is but one, that one.
  const bool look =
      !profile_ && (windows_ == 1 || total_steps_ - state_.step == 1);
  std::optional<Execution> metered;
  if (look) {
    profile_.emplace(device_, ledger_, kept_);
    metered.emplace(
        model_.chain, schedule_,
        ExecutionOptions{
            .meter = &kept_, .observer = &*profile_, .separate_graphs = true});
  }
  WindowProfile* profile = look ? &*profile_ : nullptr;

  if (state_.micro == 0) {
    while (loader_->batches_left() == 0) loader_->next();  // an epoch's end
    const int64_t batches =
        std::min(config_.accumulate, loader_->batches_left());
    state_.total_count = static_cast<double>(loader_->count_ahead(batches));
    accumulator_.begin(state_.total_count);
    window_loss_.reset();
    window_samples_ = 0;
  }
  while (!accumulator_.complete()) {
    if (told_to_stop()) return false;
    train_micro_batch(metered ? *metered : execution_, profile);
  }
  const bool updated = update(profile);
  if (look && !updated) profile_.reset();  // look again, at a whole one
  ++windows_;
  note_speed();
  show(false);
  return true;
}

void Session::train_micro_batch(Execution& execution, WindowProfile* profile) {
  auto batch = loader_->next();
  TORCH_INTERNAL_ASSERT(batch.has_value());
  batch_ = std::move(*batch);
  move_to(batch_, device_);
  prepare(batch_, prepare_);
  const double weight =
      accumulator_.weigh(static_cast<double>(batch_.count)) * scaler_.scale();
  Tensors outputs;
  {
    const compat::AutocastGuard autocast(autocast_);
    outputs = execution.forward({batch_.inputs, batch_.targets});
  }
  if (profile != nullptr) profile->forward_done();
  Tensors gradients(1);
  gradients[0] = torch::full_like(outputs[0], weight);
  execution.backward(std::move(gradients));
  window_loss_ =
      window_loss_.defined() ? window_loss_ + outputs[0] : outputs[0];
  window_samples_ += batch_.samples;
  state_.samples += batch_.samples;
  samples_here_ += batch_.samples;
  state_.done_count = accumulator_.done_count();
  state_.position = loader_->position();
  ++state_.micro;
}

bool Session::update(WindowProfile* profile) {
  if (profile != nullptr) profile->begin("update");
  const double rate = rate_at(rate_, state_.step);
  torch::Tensor norm;
  const bool finite = scaler_.unscale(parameter_list_);
  if (finite && config_.clip > 0) norm = accumulator_.clip(config_.clip);
  accumulator_.update([&] {
    if (finite) optimizer_->step(rate);
  });
  scaler_.update();
  if (profile != nullptr) profile->end();
  batch_ = {};
  state_.scaler = scaler_.state();
  state_.micro = 0;
  state_.done_count = 0;
  ++state_.step;
  metrics_->add(state_.step, window_loss_ / state_.total_count, norm, rate,
                window_samples_);
  if (!finite) {
    warn(
        fmt::format("update {} skipped: the gradient overflowed; the scale is "
                    "now {:g}",
                    state_.step, scaler_.scale()));
  }
  return finite;
}

void Session::note_speed() {
  if (windows_ != kWarmUpWindows) return;
  wait_for_device();
  steady_from_s_ = seconds();
  steady_from_samples_ = samples_here_;
}

double Session::samples_per_s() const {
  const bool steady = windows_ >= 2 * kWarmUpWindows;
  const double since = steady ? steady_from_s_ : 0;
  const int64_t from = steady ? steady_from_samples_ : 0;
  return static_cast<double>(samples_here_ - from) /
         std::max(seconds() - since, 1e-9);
}

bool Session::evaluates() const {
  // Random data has nothing to learn, so only on request.
  return config_.evaluate &&
         (config_.data != "random" || config_.eval_every > 0);
}

void Session::evaluate_if_due() {
  if (!evaluates()) return;
  const bool epoch_ends = loader_->batches_left() == 0;
  const bool due = config_.eval_every > 0
                       ? state_.step % config_.eval_every == 0
                       : epoch_ends;
  if (due || state_.step == total_steps_) evaluate();
}

void Session::evaluate() {
  if (evaluated_at_ == state_.step) return;
  evaluated_at_ = state_.step;
  const auto start = Clock::now();
  LoaderOptions loading;
  loading.batch = config_.batch;
  loading.shuffle = false;
  loading.workers = config_.workers;
  Loader loader(test_data_, loading);
  const torch::NoGradGuard no_grad;
  const compat::AutocastGuard autocast(autocast_);
  model_.root->eval();
  torch::Tensor loss =
      torch::zeros({}, torch::dtype(torch::kDouble).device(device_));
  torch::Tensor right = loss.clone();
  double count = 0;
  while (auto batch = loader.next()) {
    move_to(*batch, device_);
    prepare(*batch, prepare_);
    const Tensors outputs = execution_.forward({batch->inputs, batch->targets});
    loss += outputs[0];
    right += outputs[1];
    count += static_cast<double>(batch->count);
    if (told_to_stop()) {
      state_.evaluation_due = true;
      model_.root->train();
      return;
    }
  }
  model_.root->train();
  state_.evaluation_due = false;
  evaluation_ = TrainListener::Evaluation{
      state_.step, loss.item<double>() / count, right.item<double>() / count};
  metrics_->add(*evaluation_);
  if (run_.listener != nullptr) run_.listener->evaluated(*evaluation_);
  aside_s_ += std::chrono::duration<double>(Clock::now() - start).count();
}

bool Session::told_to_stop() const {
  return run_.stop && run_.stop();
}

void Session::show(bool now) {
  const double since =
      std::chrono::duration<double>(Clock::now() - last_show_).count();
  if (!now && since < kShowEveryS) return;
  metrics_->flush();
  last_show_ = Clock::now();
  if (run_.listener == nullptr) return;
  const double speed = samples_per_s();
  const double left = static_cast<double>(total_steps_ - state_.step) *
                      static_cast<double>(config_.global_batch);
  run_.listener->stepped({state_.step, total_steps_,
                          metrics_->last_loss().value_or(0),
                          rate_at(rate_, std::max<int64_t>(state_.step - 1, 0)),
                          speed, meter_.live_bytes(), meter_.peak_bytes(),
                          config_.memory_limit, speed > 0 ? left / speed : 0});
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

}  // namespace reprise::train_detail
