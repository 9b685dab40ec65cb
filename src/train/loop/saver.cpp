#include "train/loop/saver.h"

#include "base/splitmix.h"
#include "compat/rng.h"

#include <reprise/base/error.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>
#include <system_error>
#include <unistd.h>
#include <utility>

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

compat::RngState capture_rng(torch::Device device) {
  return compat::RngState::capture({torch::empty({0}, torch::device(device))});
}

/// Parameters or buffers by name, of which each must be found in a state.
class Wanted {
 public:
  Wanted(const char* what,
         const torch::OrderedDict<std::string, torch::Tensor>& tensors)
      : what_(what) {
    for (const auto& item : tensors) by_name_[item.key()] = item.value();
  }

  /// Removes `name` from those that are missing. Returns its tensor, after a check of the shape;
  /// undefined if it is not wanted.
  torch::Tensor take(const std::string& name, const torch::Tensor& value) {
    const auto found = by_name_.find(name);
    if (found == by_name_.end()) return {};
    torch::Tensor tensor = found->second;
    TORCH_CHECK(tensor.sizes() == value.sizes(), "[resume] expected ", what_,
                " '", name, "' of shape ", tensor.sizes(), ", got ",
                value.sizes());
    by_name_.erase(found);
    return tensor;
  }

  void check_complete() const {
    TORCH_CHECK(by_name_.empty(), "[resume] the state has no ", what_, " '",
                by_name_.begin()->first, "'");
  }

 private:
  const char* what_;
  std::map<std::string, torch::Tensor> by_name_;
};

/// The rest of `name` after `prefix`; nullopt if it begins otherwise.
std::optional<std::string> after(const std::string& name, const char* prefix) {
  if (!name.starts_with(prefix)) return std::nullopt;
  return name.substr(std::string_view(prefix).size());
}

/// A text that no other process and no earlier call returns.
std::string unique_text() {
  const auto now = RunClock::Clock::now().time_since_epoch().count();
  return fmt::format("{:016x}", splitmix(static_cast<uint64_t>(now),
                                         static_cast<uint64_t>(getpid())));
}

/// Whether two states are the same apart from times and the length of the metrics.
bool same_progress(const RunState& a, const RunState& b) {
  return a.step == b.step && a.micro == b.micro && a.samples == b.samples &&
         a.evaluation_due == b.evaluation_due && a.finished == b.finished &&
         a.format == b.format;
}

/// Throws unless a tensor of a state is a single number, a floating-point one or an int64.
void check_number(const std::pair<const std::string, torch::Tensor>& item,
                  bool floating) {
  const auto& [name, tensor] = item;
  TORCH_CHECK(tensor.dim() == 0 && (floating ? tensor.is_floating_point()
                                             : tensor.dtype() == torch::kLong),
              "[resume] expected '", name, "' to be one ",
              floating ? "floating-point number" : "whole number", ", got ",
              tensor.scalar_type(), " of shape ", tensor.sizes());
}

}  // namespace

void Saver::start(RunDirectory* directory) {
  directory_ = directory;
  if (directory != nullptr) {  // only this process reads the samples for it
    parts_.retry.run("reading the data",
                     [&] { data_ = parts_.setup.data.train->fingerprint(); });
  }
  enabled_ = parts_.ranks.any(directory != nullptr);
  last_ = RunClock::Clock::now();
  shared_path_.clear();
  if (!enabled_ || !parts_.exchange.sharded()) return;
  if (directory_is_shared()) return;
  shared_path_.clear();
  if (parts_.ranks.first()) {
    parts_.reporter.warn(
        "another rank does not see the run directory: rank 0 gathers the "
        "states and needs memory for all of them");
  }
}

bool Saver::directory_is_shared() {
  // Another machine may have a directory of the same name.
  std::string text;
  std::optional<std::filesystem::path> token;
  if (parts_.ranks.first()) {
    const auto path = std::filesystem::absolute(directory_->path());
    const std::string name = "ranks-" + unique_text();
    token = path / name;
    std::ofstream(*token) << "";
    text = path.string() + "\n" + name;
  }
  text = parts_.ranks.broadcast_text(text);
  const auto end = text.find('\n');
  shared_path_ = text.substr(0, end);
  std::error_code none;
  const bool sees = std::filesystem::exists(
                        shared_path_ + "/" + text.substr(end + 1), none) &&
                    access(shared_path_.c_str(), W_OK) == 0;
  const bool shared = !parts_.ranks.any(!sees);
  if (token) std::filesystem::remove(*token, none);
  return shared;
}

NamedTensors Saver::tensors(const RunState& state, int64_t window_samples,
                            const NamedTensors& parameters,
                            const NamedTensors& of_optimizer) {
  const TrainSetup& setup = parts_.setup;
  NamedTensors list;
  append(list, "parameter.", parameters);
  for (const auto& item : setup.model.root->named_buffers()) {
    list.emplace_back("buffer." + item.key(), item.value());
  }
  append(list, "optimizer.", of_optimizer);
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

StatePart Saver::part(const RunState& state, int64_t window_samples,
                      const std::string& save) {
  const TrainSetup& setup = parts_.setup;
  StatePart part = parts_.exchange.part_of_state(parts_.optimizer.state());
  part.save = save;
  for (StatePiece& piece : part.pieces) piece.name = "optimizer." + piece.name;
  if (setup.sharded && parts_.exchange.saves_pieces()) {
    for (auto& piece : setup.sharded->pieces()) {
      piece.name = "parameter." + piece.name;
      part.pieces.push_back(state_piece(std::move(piece)));
    }
  }
  if (parts_.ranks.first()) {
    part.whole =
        tensors(state, window_samples,
                setup.sharded ? NamedTensors() : setup.parameters, part.whole);
  } else {
    NamedTensors own;
    append(own, "optimizer.", part.whole);
    part.whole = std::move(own);
  }
  return part;
}

std::optional<Saver::Found> Saver::newest() {
  std::optional<Found> saved;
  if (directory_ != nullptr) {
    auto files = StateFiles::newest(
        *directory_, [this](const auto& text) { parts_.reporter.warn(text); });
    if (files) {
      saved.emplace();
      saved->state = files->state();
      saved->tensors.assign(files->tensors().begin(), files->tensors().end());
      saved->files.emplace(std::move(*files));
    }
  }
  if (!parts_.ranks.group()) return saved;
  // Only rank 0 needs access to the directory.
  const std::string state =
      parts_.ranks.broadcast_text(saved ? to_text(saved->state) : "");
  if (state.empty()) return std::nullopt;
  nlohmann::json shapes = nlohmann::json::array();
  if (parts_.ranks.first()) {
    for (const auto& [name, shape] : saved->tensors) {
      shapes.push_back({name, static_cast<int>(shape.type), shape.sizes});
    }
  }
  shapes = nlohmann::json::parse(parts_.ranks.broadcast_text(shapes.dump()));
  if (parts_.ranks.first()) return saved;
  saved.emplace();
  saved->state = run_state_from_text(state);
  for (const auto& entry : shapes) {
    saved->tensors.emplace_back(
        entry.at(0).get<std::string>(),
        StateFiles::Shape{
            static_cast<torch::ScalarType>(entry.at(1).get<int>()),
            entry.at(2).get<std::vector<int64_t>>()});
  }
  return saved;
}

torch::Tensor Saver::read(const Found& saved, size_t index) {
  const auto& [name, shape] = saved.tensors[index];
  torch::Tensor tensor =
      saved.files ? saved.files->read(name)
                  : torch::empty(shape.sizes, torch::dtype(shape.type));
  parts_.ranks.broadcast({tensor});
  return tensor;
}

void Saver::restore(const Found& saved, RunState& state,
                    int64_t& window_samples) {
  TrainSetup& setup = parts_.setup;
  const std::string& data = saved.state.data;
  TORCH_CHECK(data.empty() || data_.empty() || data == data_,
              "[--resume] expected the data that the run was trained on, with "
              "fingerprint ",
              data, ", got other data of the name ", setup.data.name,
              ", with fingerprint ", data_,
              "; restore it, or start a new run with --out");
  HostParameters* const host = setup.host_parameters.get();
  if (host != nullptr && host->on_host() && saved.state.micro > 0) {
    TORCH_CHECK_WITH(OutOfMemoryError, host->reserve_gradients(),
                     "[resume] the host gives no memory for the gradients of "
                     "the window that the state was saved in");
  }
  const HostParameters::Readable readable(host);
  const torch::NoGradGuard no_grad;
  restored_ = state = saved.state;
  torch::nn::Module& root = *setup.model.root;
  Wanted parameters("parameter", root.named_parameters());
  Wanted buffers("buffer", root.named_buffers());
  // State in host memory need not fit on the device.
  const bool to_device = parts_.runner.host_state_bytes() == 0;
  NamedTensors of_optimizer;
  std::map<std::string, torch::Tensor> others;
  for (size_t i = 0; i < saved.tensors.size(); ++i) {
    const std::string& name = saved.tensors[i].first;
    const torch::Tensor value = read(saved, i);
    if (const auto key = after(name, "parameter.")) {
      torch::Tensor parameter = parameters.take(*key, value);
      if (!parameter.defined()) continue;
      if (setup.sharded) {
        setup.sharded->load({{*key, value}});
      } else {
        parameter.copy_(value);
      }
    } else if (const auto buffer_name = after(name, "buffer.")) {
      torch::Tensor buffer = buffers.take(*buffer_name, value);
      if (buffer.defined()) buffer.copy_(value);
    } else if (const auto state_name = after(name, "optimizer.")) {
      const bool moves = to_device && value.dim() > 0;
      for (auto& item : parts_.exchange.own_state(
               {{*state_name, moves ? value.to(setup.device) : value}})) {
        of_optimizer.push_back(std::move(item));
      }
    } else {
      others[name] = value;
    }
  }
  parameters.check_complete();
  buffers.check_complete();
  parts_.optimizer.load(std::move(of_optimizer));
  parts_.gradients.scaler().load(state.scaler);
  restore_window(others, state, window_samples);
  std::vector<torch::Tensor> rng;
  for (const auto& [name, tensor] : others) {
    if (name.starts_with("rng.")) rng.push_back(tensor);
  }
  const auto here = capture_rng(setup.device);
  if (rng.size() == here.states().size()) {
    here.with_states(rng).restore();
  } else {
    parts_.reporter.warn(
        "the state is of another kind of device: random numbers start anew");
  }
}

void Saver::restore_window(const std::map<std::string, torch::Tensor>& tensors,
                           RunState& state, int64_t& window_samples) {
  // If a single process began the window, rank 0 takes over its gradients.
  if (state.micro == 0 || !parts_.ranks.first()) return;
  HalfGradients* const half = parts_.runner.half_gradients();
  for (auto& [name, parameter] : parts_.setup.parameters) {
    const auto found = tensors.find("gradient." + name);
    if (found == tensors.end()) continue;
    TORCH_CHECK(found->second.sizes() == parameter.sizes() &&
                    found->second.is_floating_point(),
                "[resume] expected '", found->first, "' of shape ",
                parameter.sizes(), ", got ", found->second.sizes());
    torch::Tensor gradient = found->second.to(parameter.device());
    if (half != nullptr) {
      half->set_sum(parameter, std::move(gradient));
    } else {
      parameter.mutable_grad() = std::move(gradient);
    }
  }
  if (const auto found = tensors.find("window.loss"); found != tensors.end()) {
    check_number(*found, /*floating=*/true);
    parts_.runner.micro_step().set_loss(found->second);
  }
  if (const auto found = tensors.find("window.samples");
      found != tensors.end()) {
    check_number(*found, /*floating=*/false);
    window_samples = found->second.item<int64_t>();
  }
  if (parts_.ranks.can_stop_in_window()) {
    parts_.gradients.resume(state.total_count, state.done_count);
  }
}

bool Saver::time_is_up() const {
  return RunClock::since(last_) > kSaveEveryS;
}

void Saver::save(RunState& state, int64_t window_samples) {
  // Writing it again would divide a whole state between two saves for a moment.
  if (!enabled_ || (restored_ && same_progress(*restored_, state))) return;
  const HostParameters::Readable readable(parts_.setup.host_parameters.get());
  if (!shared_path_.empty()) {
    const std::string save = parts_.ranks.broadcast_text(unique_text());
    const bool complete = save_other_parts(state, window_samples, save);
    if (!parts_.ranks.first()) return;
    write(
        state,
        [&] {
          TORCH_CHECK(complete, "another rank could not write its part");
          return part(state, window_samples, save);
        },
        parts_.ranks.size());
    return;
  }
  const auto whole = [&] {
    const auto& sharded = parts_.setup.sharded;
    return StatePart{
        tensors(state, window_samples,
                sharded ? sharded->gather_all() : parts_.setup.parameters,
                parts_.exchange.whole_state(parts_.optimizer.state())),
        {}};
  };
  // All ranks take part in gathering a sharded state.
  StatePart collected;
  const bool together = parts_.exchange.sharded();
  if (together) collected = whole();
  if (!parts_.ranks.first()) return;
  write(
      state, [&] { return together ? collected : whole(); }, /*ranks=*/1);
}

bool Saver::save_other_parts(const RunState& state, int64_t window_samples,
                             const std::string& save) {
  std::string failure;
  if (!parts_.ranks.first()) {
    try {
      parts_.retry.run("saving", [&] {
        save_state_part(shared_path_, state, parts_.ranks.rank(),
                        part(state, window_samples, save));
      });
    } catch (const c10::Error& error) {
      failure = error.what_without_backtrace();
    } catch (const std::exception& error) {
      failure = error.what();
    }
    if (!failure.empty()) parts_.reporter.warn("not saved: " + failure);
  }
  return !parts_.ranks.any(!failure.empty());
}

void Saver::write(RunState& state, const std::function<StatePart()>& collect,
                  int ranks) {
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
        state.data = data_;
        save_state(*directory_, state, ranks, collect(),
                   parts_.setup.options.keep,
                   [this](const auto& text) { parts_.reporter.warn(text); });
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
