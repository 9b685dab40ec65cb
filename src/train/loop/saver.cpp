#include "train/loop/saver.h"

#include "compat/rng.h"

#include <reprise/base/error.h>

#include <fmt/format.h>

#include <map>
#include <utility>
#include <vector>

namespace reprise::detail {
namespace {

/// Seconds between saves if no number of updates is given.
constexpr double kSaveEveryS = 600;

void append(NamedTensors& list, const std::string& prefix,
            const NamedTensors& tensors) {
  for (const auto& [name, tensor] : tensors) {
    if (tensor.defined()) list.emplace_back(prefix + name, tensor);
  }
}

/// Returns the tensors whose names begin with `prefix`, with the prefix
/// removed.
NamedTensors take(const NamedTensors& tensors, const std::string& prefix) {
  NamedTensors found;
  for (const auto& [name, tensor] : tensors) {
    if (name.starts_with(prefix)) {
      found.emplace_back(name.substr(prefix.size()), tensor);
    }
  }
  return found;
}

compat::RngState capture_rng(torch::Device device) {
  return compat::RngState::capture({torch::empty({0}, torch::device(device))});
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

void Saver::start(RunDirectory* directory) {
  directory_ = directory;
  enabled_ = parts_.ranks.any(directory != nullptr);
  last_ = RunClock::Clock::now();
}

NamedTensors Saver::tensors(const RunState& state, int64_t window_samples) {
  const TrainSetup& setup = parts_.setup;
  NamedTensors list;
  append(list, "parameter.",
         setup.sharded ? setup.sharded->gather_all() : setup.parameters);
  for (const auto& item : setup.model.root->named_buffers()) {
    list.emplace_back("buffer." + item.key(), item.value());
  }
  append(list, "optimizer.",
         parts_.exchange.whole_state(parts_.optimizer.state()));
  if (state.micro > 0) {
    const HalfGradients* const half = parts_.runner.half_gradients();
    for (const auto& [name, parameter] : setup.parameters) {
      const torch::Tensor gradient =
          half != nullptr ? half->sum(parameter) : parameter.grad();
      if (gradient.defined()) list.emplace_back("gradient." + name, gradient);
    }
    append(list, "window.", {{"loss", parts_.runner.loss()}});
    list.emplace_back("window.samples", torch::tensor(window_samples));
  }
  const auto rng = capture_rng(setup.device).states();
  for (size_t i = 0; i < rng.size(); ++i) {
    list.emplace_back(fmt::format("rng.{}", i), rng[i]);
  }
  return list;
}

std::optional<SavedState> Saver::newest() {
  std::optional<SavedState> saved;
  if (directory_ != nullptr) {
    saved = newest_state(*directory_, [this](const std::string& text) {
      parts_.reporter.warn("passed over: " + text);
    });
  }
  if (!parts_.ranks.group()) return saved;
  // Only rank 0 needs access to the directory.
  const std::string state =
      parts_.ranks.broadcast_text(saved ? to_text(saved->state) : "");
  if (state.empty()) return std::nullopt;
  if (!parts_.ranks.first()) saved.emplace();
  saved->state = run_state_from_text(state);
  parts_.ranks.broadcast_named(saved->tensors);
  return saved;
}

void Saver::restore(const SavedState& saved, RunState& state,
                    int64_t& window_samples) {
  TrainSetup& setup = parts_.setup;
  HostParameters* const host = setup.host_parameters.get();
  if (host != nullptr && host->on_host() && saved.state.micro > 0) {
    TORCH_CHECK_WITH(OutOfMemoryError, host->reserve_gradients(),
                     "[resume] the host gives no memory for the gradients of "
                     "the window that the state was saved in");
  }
  const HostParameters::Readable readable(host);
  state = saved.state;
  torch::nn::Module& root = *setup.model.root;
  const NamedTensors parameters = take(saved.tensors, "parameter.");
  if (setup.sharded) {
    setup.sharded->load(parameters);
  } else {
    copy_into(root.named_parameters(), parameters, "parameter");
  }
  copy_into(root.named_buffers(), take(saved.tensors, "buffer."), "buffer");
  NamedTensors of_optimizer = take(saved.tensors, "optimizer.");
  // State in host memory need not fit on the device.
  if (parts_.runner.host_state_bytes() == 0) {
    for (auto& [name, tensor] : of_optimizer) {
      if (tensor.dim() > 0) tensor = tensor.to(setup.device);
    }
  }
  parts_.optimizer.load(parts_.exchange.own_state(std::move(of_optimizer)));
  parts_.gradients.scaler().load(state.scaler);
  // If a single process began the window, rank 0 takes over its gradients.
  if (state.micro > 0 && parts_.ranks.first()) {
    const auto by_name = [&saved](const char* prefix) {
      const NamedTensors list = take(saved.tensors, prefix);
      return std::map<std::string, torch::Tensor>(list.begin(), list.end());
    };
    const auto gradients = by_name("gradient.");
    HalfGradients* const half = parts_.runner.half_gradients();
    for (auto& [name, parameter] : setup.parameters) {
      const auto found = gradients.find(name);
      if (found != gradients.end()) {
        torch::Tensor gradient = found->second.to(parameter.device());
        if (half != nullptr) {
          half->set_sum(parameter, std::move(gradient));
        } else {
          parameter.mutable_grad() = std::move(gradient);
        }
      }
    }
    const auto window = by_name("window.");
    if (const auto found = window.find("loss"); found != window.end()) {
      parts_.runner.micro_step().set_loss(found->second);
    }
    if (const auto found = window.find("samples"); found != window.end()) {
      window_samples = found->second.item<int64_t>();
    }
    if (parts_.ranks.can_stop_in_window()) {
      parts_.gradients.resume(state.total_count, state.done_count);
    }
  }
  std::vector<torch::Tensor> rng;
  for (const auto& [name, tensor] : take(saved.tensors, "rng.")) {
    rng.push_back(tensor);
  }
  const auto here = capture_rng(setup.device);
  if (rng.size() == here.states().size()) {
    here.with_states(rng).restore();
  } else {
    parts_.reporter.warn(
        "the state is of another kind of device: random numbers start anew");
  }
}

bool Saver::time_is_up() const {
  return RunClock::since(last_) > kSaveEveryS;
}

void Saver::save(RunState& state, int64_t window_samples) {
  if (!enabled_) return;
  const HostParameters::Readable readable(parts_.setup.host_parameters.get());
  // All ranks take part in gathering a sharded state.
  NamedTensors collected;
  const bool together = parts_.exchange.sharded();
  if (together) collected = tensors(state, window_samples);
  if (!parts_.ranks.first()) return;
  parts_.reporter.training(false);
  {
    const RunClock::Pause pause(parts_.clock);
    Metrics& metrics = parts_.reporter.metrics();
    try {
      parts_.retry.run("saving", [&] {
        metrics.flush();
        state.metrics_bytes = metrics.synced_bytes();
        parts_.clock.wait_for_device();
        state.train_s = parts_.clock.total_seconds();
        save_state(*directory_, state,
                   together ? collected : tensors(state, window_samples),
                   parts_.setup.options.keep);
      });
      failed_ = false;
      parts_.reporter.saved(fmt::format("{} at update {}{}", directory_->path(),
                                        state.step,
                                        state.micro > 0 ? " and a part" : ""));
    } catch (const c10::Error& error) {
      failed_ = true;
      parts_.reporter.warn(std::string("not saved: ") +
                           error.what_without_backtrace());
    } catch (const std::exception& error) {
      failed_ = true;
      parts_.reporter.warn(std::string("not saved: ") + error.what());
    }
  }
  last_ = RunClock::Clock::now();
  parts_.reporter.training(true);
}

void Saver::save_config() {
  if (directory_ == nullptr) return;
  try {
    directory_->update_config(to_json(parts_.setup.options));
  } catch (const Error& error) {
    // Only warn, as in save().
    parts_.reporter.warn(std::string("not saved: ") + error.what());
  }
}

}  // namespace reprise::detail
