// A session among several processes: what they share, and what they agree on.
#include "base/splitmix.h"
#include "compat/cuda.h"
#include "models/batch_norm.h"
#include "train/loop/session.h"
#include "train/optim/registry.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

namespace reprise::detail {
namespace {

using nlohmann::json;

/// What an optimizer keeps for each value of a parameter; they can be divided
/// anywhere.
std::vector<std::string> kinds_of(const OptimizerOptions& options) {
  const OptimizerInfo& info = find_optimizer(options.name);
  if (info.elementwise_state != nullptr) return info.elementwise_state(options);
  TORCH_CHECK(false,
              "[--shard] optimizer works with sgd, adam and adamw, whose state "
              "can be divided anywhere, got ",
              options.name);
}

/// Names, shapes and types of all that is trained.
std::string digest(const NamedTensors& parameters) {
  std::string text;
  for (const auto& [name, tensor] : parameters) {
    text += fmt::format("{} {} ", name, c10::toString(tensor.scalar_type()));
    for (const int64_t size : tensor.sizes()) text += fmt::format("{},", size);
  }
  return fmt::format("{} parameters {:016x}", parameters.size(),
                     std::hash<std::string>()(text));
}

}  // namespace

void Session::join_ranks() {
  TORCH_CHECK(
      config_.ranks == group_->size(),
      "[Training] expected the configuration's ranks to be the group's ",
      group_->size(), ", got ", config_.ranks);
  group_->require_same({{"the model", digest(parameters_)},
                        {"data", fmt::format("{}, {} samples", config_.data,
                                             train_data_->size())}});
  group_->broadcast(parameter_list_);
  group_->broadcast(model_.root->buffers());
  make_reducer();
  execution_ = make_execution();
  if (const int64_t channels = shared_channels(); channels > 0) {
    norms_ = std::make_shared<NormSync>(group_, channels);
  }
}

void Session::make_reducer() {
  std::map<const void*, int> first;  // stage that uses it
  for (int i = model_.chain.size(); i-- > 0;) {
    for (const auto& module : model_.chain[i].modules()) {
      for (const auto& parameter : module->parameters()) {
        first[parameter.unsafeGetTensorImpl()] = i;
      }
    }
  }
  std::vector<GradientReducer::Parameter> list;
  std::map<const void*, bool> seen;
  for (const auto& [name, parameter] : parameters_) {
    const void* key = parameter.unsafeGetTensorImpl();
    if (!seen.emplace(key, true).second) continue;
    const auto found = first.find(key);
    list.push_back({name, parameter, found == first.end() ? 0 : found->second});
  }
  ReducerOptions options;
  options.bucket_bytes = config_.bucket_bytes;
  options.bf16 = config_.reduce == ReduceType::kBf16;
  options.shard = config_.shard == Sharding::kOptimizer;
  if (options.shard) kinds_of(config_.optimizer);
  reducer_ = std::make_unique<GradientReducer>(group_, list, options);
}

int64_t Session::shared_channels() const {
  if (!config_.sync_norm || !group_ || group_->size() == 1) return 0;
  int64_t most = 0;
  for (const auto& module : model_.root->modules(/*include_self=*/false)) {
    if (const auto* norm = module->as<detail::BatchNorm2d>()) {
      most = std::max(most, norm->options.num_features());
    }
  }
  return most;
}

int64_t Session::steps_of(const Loader::Window& window) const {
  const int64_t ranks = group_->size();
  const int64_t share = (window.samples + ranks - 1) / ranks;
  return (share + config_.batch - 1) / config_.batch;
}

void Session::run_empty_micro_batch() {
  // Any sample: its numbers go nowhere.
  Batch batch = train_data_->get({0});
  move_to(batch, device_);
  prepare(batch, prepare_);
  group_->heartbeat();
  --steps_left_;
  const SharedNormScope shared(norms_, /*counts=*/false);
  Tensors outputs;
  {
    const compat::AutocastGuard autocast(autocast_);
    outputs = execution_.forward({batch.inputs, batch.targets});
  }
  reducing_ = steps_left_ == 0;
  execution_.backward({torch::zeros_like(outputs[0])});
  reducing_ = false;
}

std::optional<BudgetPlanner::Decision> Session::shared(
    std::optional<BudgetPlanner::Decision> own) const {
  if (!group_) return own;
  std::string text;
  if (own) {
    text = json{{"micro_batch", own->micro_batch},
                {"accumulate", own->accumulate},
                {"name", own->schedule.name()},
                {"schedule", own->schedule.to_text()},
                {"peak_bytes", own->predicted_peak_bytes},
                {"step_ms", own->predicted_step_ms},
                {"text", own->text},
                {"weight_copies", own->weight_copies},
                {"graph", own->graph}}
               .dump();
  }
  text = group_->broadcast_text(text);
  if (text.empty()) return std::nullopt;
  const json j = json::parse(text);
  return BudgetPlanner::Decision{
      j.at("micro_batch"),
      j.at("accumulate"),
      Schedule::parse(j.at("name"), model_.chain.size(),
                      j.at("schedule").get<std::string>()),
      j.at("peak_bytes"),
      j.at("step_ms"),
      j.at("text"),
      j.at("weight_copies"),
      j.at("graph")};
}

void Session::start_random_numbers() {
  // Each rank has numbers of its own, and a window's do not depend on what came
  // before it: so a state need not have every rank's.
  if (group_->size() == 1) return;
  const uint64_t window =
      detail::splitmix(config_.seed, static_cast<uint64_t>(state_.step));
  torch::manual_seed(
      detail::splitmix(window, static_cast<uint64_t>(group_->rank()) + 1));
}

void Session::train_window_together() {
  const std::string what = fmt::format("update {}", state_.step + 1);
  for (int failures = 0;; ++failures) {
    bool elsewhere = false;  // it failed, as the norms have heard
    const auto error = out_of_memory_in([&] {
      try {
        if (norms_) norms_->open();
        try_window();
        reducer_->backward_ended();
        if (norms_) norms_->close();
      } catch (const c10::Error&) {
        if (!norms_ || !norms_->failed_elsewhere()) throw;
        elsewhere = true;
        return;
      }
      window_loss_ = reducer_->finish(step_.loss());
    });
    reducing_ = false;
    if (error && norms_) norms_->fail();
    if (error || elsewhere) {
      drop_window();
      graphs_.drop_for_memory();
      if (device_.is_cuda()) compat::empty_cuda_cache();
      reducer_->give_up();
    }
    group_->pause_watchdog();
    if (group_->all_reduce_max({error ? 1 : 0}).at(0) == 0) break;
    const std::string text =
        error ? fmt::format("{} ran out of memory: {}", what, *error)
              : what + " ran out of memory on another rank";
    drop_window();
    tighten_after_failure();
    restart_window();
    if (failures + 1 >= OomRetry::kMost) {
      save();
      throw RetriesExhausted(
          {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
          fmt::format("[train] {} times in a row {}", OomRetry::kMost, text));
    }
    warn(text + "; starts again");
  }
  loader_->pass_window();
  state_.position = loader_->position();
  state_.samples += window_rest_;
  samples_here_ += window_rest_;
  const bool updated = update(profiling_ ? &*profile_ : nullptr);
  if (profiling_ && !updated) profile_.reset();
  profiling_ = false;
}

bool Session::ready_gradients(torch::Tensor& norm) {
  const bool sharded = group_ && config_.shard != Sharding::kNone;
  bool finite = true;
  if (!sharded) {
    within_update([&] { finite = scaler_.unscale(parameter_list_); });
    if (!finite || config_.clip <= 0) return finite;
    within_update([&] { norm = accumulator_.clip(config_.clip); });
    return true;
  }
  const auto pieces = values(reducer_->pieces());
  within_update([&] { finite = scaler_.unscale(pieces); });
  if (config_.precision == Precision::kFp16) {
    finite = group_->all_reduce_max({finite ? 0 : 1}).at(0) == 0;
    scaler_.agree(finite);
  }
  if (!finite || config_.clip <= 0) return finite;
  double own = 0;
  within_update([&] { own = gradient_norm(pieces).item<double>(); });
  const double all = std::sqrt(group_->all_reduce_sum({own * own}).at(0));
  within_update([&] {
    norm =
        torch::scalar_tensor(all, torch::dtype(torch::kFloat).device(device_));
    clip_gradients(pieces, norm, config_.clip);
  });
  return true;
}

void Session::step_optimizer(double rate) {
  within_update([&] { optimizer_->step(rate); });
  if (!group_ || config_.shard == Sharding::kNone) return;
  for (auto [name, piece] : reducer_->pieces()) piece.mutable_grad().reset();
  reducer_->share_pieces();
}

void Session::within_update(const std::function<void()>& piece) {
  if (!group_) {
    piece();
  } else {
    oom_retry_.run(fmt::format("the step of update {}", state_.step + 1),
                   piece);
  }
}

void Session::agree_after_window() {
  const double since =
      std::chrono::duration<double>(Clock::now() - last_save_).count();
  const bool first = first_rank();
  const auto agreed = group_->all_reduce_max(
      {told_to_stop() ? 1 : 0, first && time_is_up_ ? 1 : 0,
       first && since > kSaveEveryS ? 1 : 0});
  stop_agreed_ = agreed[0] > 0;
  time_is_up_ = agreed[1] > 0;
  save_agreed_ = agreed[2] > 0;
}

NamedTensors Session::optimizer_state() {
  if (!group_ || config_.shard == Sharding::kNone) return optimizer_->state();
  NamedTensors own = optimizer_->state();
  NamedTensors list = reducer_->whole(own, kinds_of(config_.optimizer));
  // Counters are the same wherever a part of a parameter is.
  const std::map<std::string, torch::Tensor> by_name(own.begin(), own.end());
  std::vector<int64_t> counts;
  const auto count = [&](const std::string& name) {
    const auto found = by_name.find(name);
    counts.push_back(found == by_name.end() ? -1
                                            : found->second.item<int64_t>());
  };
  count("step");
  for (const auto& item : parameters_) count("step." + item.first);
  counts = group_->all_reduce_max(std::move(counts));
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] < 0) continue;
    list.emplace_back(i == 0 ? "step" : "step." + parameters_[i - 1].first,
                      torch::scalar_tensor(counts[i], torch::kLong));
  }
  return list;
}

void Session::load_optimizer(NamedTensors state) {
  if (group_ && config_.shard != Sharding::kNone) {
    state = reducer_->parts(state, kinds_of(config_.optimizer));
    std::set<std::string> here;
    for (const auto& item : reducer_->pieces()) here.insert(item.first);
    std::erase_if(state, [&](const auto& item) {
      return item.first.starts_with("step.") &&
             here.count(item.first.substr(5)) == 0;
    });
  }
  optimizer_->load(state);
}

}  // namespace reprise::detail
