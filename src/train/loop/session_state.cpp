// A session's state on disk, and its end.
#include "compat/cuda.h"
#include "train/loop/session.h"

#include <reprise/memory/process_memory.h>
#include <reprise/models/weights.h>

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

namespace reprise::detail {
namespace {

void append(NamedTensors& list, const std::string& prefix,
            const NamedTensors& tensors) {
  for (const auto& [name, tensor] : tensors) {
    if (tensor.defined()) list.emplace_back(prefix + name, tensor);
  }
}

/// The tensors whose names begin with `prefix`, without it.
NamedTensors take(const NamedTensors& tensors, const std::string& prefix) {
  NamedTensors found;
  for (const auto& [name, tensor] : tensors) {
    if (name.starts_with(prefix)) {
      found.emplace_back(name.substr(prefix.size()), tensor);
    }
  }
  return found;
}

/// A tensor on `device` whose generator's state is to be saved.
torch::Tensor on(torch::Device device) {
  return torch::empty({0}, torch::device(device));
}

void copy_into(const torch::OrderedDict<std::string, torch::Tensor>& into,
               const NamedTensors& from, const std::string& what) {
  std::map<std::string, torch::Tensor> by_name(from.begin(), from.end());
  const torch::NoGradGuard no_grad;
  for (const auto& item : into) {
    const auto found = by_name.find(item.key());
    TORCH_CHECK(found != by_name.end(), "[resume] the state has no ", what,
                " '", item.key(), "'");
    TORCH_CHECK(found->second.sizes() == item.value().sizes(),
                "[resume] expected ", what, " '", item.key(), "' of shape ",
                item.value().sizes(), ", got ", found->second.sizes());
    torch::Tensor(item.value()).copy_(found->second);
  }
}

}  // namespace

NamedTensors Session::tensors_to_save() {
  NamedTensors list;
  append(list, "parameter.", parameters_);
  for (const auto& item : model_.root->named_buffers()) {
    list.emplace_back("buffer." + item.key(), item.value());
  }
  append(list, "optimizer.", optimizer_state());
  if (state_.micro > 0) {
    for (const auto& [name, parameter] : parameters_) {
      if (parameter.grad().defined()) {
        list.emplace_back("gradient." + name, parameter.grad());
      }
    }
    list.emplace_back("window.loss", step_.loss());
    list.emplace_back("window.samples", torch::tensor(window_samples_));
  }
  const auto rng = compat::RngState::capture({on(device_)}).states();
  for (size_t i = 0; i < rng.size(); ++i) {
    list.emplace_back(fmt::format("rng.{}", i), rng[i]);
  }
  return list;
}

std::optional<RunDirectory::Saved> Session::newest() {
  const auto warned = [this](const std::string& text) {
    warn("passed over: " + text);
  };
  if (!group_) {
    TORCH_INTERNAL_ASSERT(run_.directory != nullptr);
    return run_.directory->newest(warned);
  }
  // Only the first rank need see the directory.
  std::optional<RunDirectory::Saved> saved;
  if (run_.directory != nullptr) saved = run_.directory->newest(warned);
  const std::string state =
      group_->broadcast_text(saved ? to_text(saved->state) : "");
  if (state.empty()) return std::nullopt;
  if (!first_rank()) saved.emplace();
  saved->state = run_state_from_text(state);
  group_->broadcast_named(saved->tensors);
  return saved;
}

void Session::load(const RunDirectory::Saved& saved) {
  drop_window();  // of an attempt that failed half-way
  state_ = saved.state;
  copy_into(model_.root->named_parameters(), take(saved.tensors, "parameter."),
            "parameter");
  copy_into(model_.root->named_buffers(), take(saved.tensors, "buffer."),
            "buffer");
  NamedTensors kept_by_optimizer = take(saved.tensors, "optimizer.");
  for (auto& [name, tensor] : kept_by_optimizer) {
    if (tensor.dim() > 0) tensor = tensor.to(device_);
  }
  load_optimizer(std::move(kept_by_optimizer));
  scaler_.load(state_.scaler);
  std::map<std::string, torch::Tensor> gradients;
  for (auto& [name, tensor] : take(saved.tensors, "gradient.")) {
    gradients[name] = tensor;
  }
  // A window begun by one process: what it had done is the first rank's.
  if (state_.micro > 0 && first_rank()) {
    for (auto& [name, parameter] : parameters_) {
      const auto found = gradients.find(name);
      if (found != gradients.end()) {
        parameter.mutable_grad() = found->second.to(device_);
      }
    }
    for (const auto& [name, tensor] : take(saved.tensors, "window.")) {
      if (name == "loss") step_.set_loss(tensor);
      if (name == "samples") window_samples_ = tensor.item<int64_t>();
    }
    if (!group_) accumulator_.resume(state_.total_count, state_.done_count);
  }
  std::vector<torch::Tensor> rng;
  for (const auto& [name, tensor] : take(saved.tensors, "rng.")) {
    rng.push_back(tensor);
  }
  const auto here = compat::RngState::capture({on(device_)});
  if (rng.size() == here.states().size()) {
    here.with_states(rng).restore();
  } else {
    warn("the state is of another kind of device: random numbers start anew");
  }
}

bool Session::save() {
  if (!saves_) return true;
  // All take part where each has a share of the state.
  NamedTensors shared_state;
  const bool together = group_ && config_.shard != Sharding::kNone;
  if (together) shared_state = tensors_to_save();
  if (!first_rank()) return true;
  tell_training(false);
  const auto start = Clock::now();
  try {
    oom_retry_.run("saving", [&] {
      metrics_->flush();
      state_.metrics_bytes = metrics_->synced_bytes();
      wait_for_device();
      state_.train_s = before_s_ + seconds();
      run_.directory->save(state_, together ? shared_state : tensors_to_save(),
                           config_.keep);
    });
    save_failed_ = false;
    if (run_.listener != nullptr) {
      run_.listener->saved(fmt::format("{} at update {}{}",
                                       run_.directory->path(), state_.step,
                                       state_.micro > 0 ? " and a part" : ""));
    }
  } catch (const c10::Error& error) {
    // Training goes on: the last good state is whole, and a later attempt may
    // find the disk with room again.
    save_failed_ = true;
    warn(std::string("not saved: ") + error.what_without_backtrace());
  } catch (const std::exception& error) {
    save_failed_ = true;
    warn(std::string("not saved: ") + error.what());
  }
  last_save_ = Clock::now();
  aside_s_ += std::chrono::duration<double>(last_save_ - start).count();
  tell_training(true);
  return !save_failed_;
}

void Session::save_if_due() {
  const double since =
      std::chrono::duration<double>(Clock::now() - last_save_).count();
  const bool due = config_.save_every > 0
                       ? state_.step % config_.save_every == 0
                       : (group_ ? save_agreed_ : since > kSaveEveryS);
  if (due && !at_end()) save();
}

TrainResult Session::finish() {
  wait_for_device();
  tell_training(false);
  running_ = false;
  const double trained = seconds();
  const double speed = samples_per_s();
  const auto doubts = audit_.doubts(
      {trained, waited_s_ + loader_->waited_s(), denormal_share_, device_});
  stopped_ = state_.step < total_steps_ && !time_is_up_;
  state_.finished = !stopped_;
  show(true);
  save();
  if (!stopped_ && !run_.export_path.empty() && first_rank()) {
    oom_retry_.run("exporting",
                   [this] { export_weights(model_, run_.export_path); });
  }

  TrainSummary s;
  s.model = model_.name;
  s.device = config_.device;
  s.precision = to_text(config_.precision);
  s.optimizer = config_.optimizer.name;
  s.recompute = schedule_.name();
  s.data = config_.data;
  s.parameters = parameter_count(model_);
  s.micro_batch = config_.batch;
  s.accumulate = config_.accumulate;
  s.global_batch = config_.global_batch;
  s.ranks = config_.ranks;
  if (group_) {
    const auto& reduced = reducer_->counters();
    s.backend = group_->backend();
    s.reduce_calls = reduced.calls;
    s.reduce_bytes = reduced.bytes;
    s.reduce_windows = reduced.windows;
    s.reduce_s = reduced.busy_s;
    s.reduce_wait_s = reduced.exposed_s;
  }
  s.steps = state_.step;
  s.skipped = state_.scaler.skipped;
  s.time_s = before_s_ + trained;
  s.samples_per_s = speed;
  s.wait_s = waited_s_ + loader_->waited_s();
  s.data_samples = train_data_->size();
  s.loss = metrics_->last_loss();
  if (evaluation_) {
    s.eval_loss = evaluation_->loss;
    s.eval_accuracy = evaluation_->accuracy;
  }
  s.peak_bytes = peak_bytes();
  s.dataset_bytes = dataset_bytes_;
  s.warnings = doubts;
  if (device_.is_cuda()) s.reserved_bytes = meter_.reserved_peak_bytes();
  s.rss_peak_bytes = process_memory().rss_peak;
  if (host_) s.host_bytes = host_->held_bytes();
  s.limit_bytes = config_.memory_limit;
  if (decision_) {
    s.predicted = {predicted_peak_bytes(), decision_->predicted_step_ms};
  }
  s.replans = replans_;
  s.graph = graphs_.state();
  s.graph_captures = graphs_.captures();
  s.graph_replays = graphs_.replays();
  if (profile_) {
    s.kept_bytes = profile_->kept_bytes();
    s.peak_phase = profile_->phase();
    if (profile_->stage() >= 0) {
      s.peak_stage = model_.chain[profile_->stage()].name();
    }
    s.window_peak_bytes = profile_->peak_bytes();
    s.memory = profile_->memory();
  }
  return {s, stopped_, save_failed_};
}

}  // namespace reprise::detail
