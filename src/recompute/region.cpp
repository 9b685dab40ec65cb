#include "compat/cuda.h"
#include "compat/saved_tensors.h"
#include "recompute/recompute_context.h"
#include "recompute/stage_checks.h"
#include "recompute/stage_graph.h"

#include <reprise/memory/meter.h>
#include <reprise/recompute/region.h>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <unordered_map>
#include <utility>

namespace reprise {
namespace {

using StorageKey = const c10::StorageImpl*;

/// Decides what a call of region() does on this thread.
class RegionPolicy {
 public:
  virtual ~RegionPolicy() = default;
  virtual Tensors run(const std::string& name,
                      std::function<Tensors(const Tensors&)> function,
                      const Tensors& inputs, const Modules& modules) = 0;
};

thread_local RegionPolicy* t_region_policy = nullptr;

/// Sets the policy of this thread during its lifetime; null: plain calls.
class RegionScope {
 public:
  explicit RegionScope(RegionPolicy* policy)
      : before_(std::exchange(t_region_policy, policy)) {}
  ~RegionScope() { t_region_policy = before_; }
  RegionScope(const RegionScope&) = delete;
  RegionScope& operator=(const RegionScope&) = delete;

 private:
  RegionPolicy* before_;
};

class RecomputeRegions final : public RegionPolicy {
 public:
  explicit RecomputeRegions(const std::vector<std::string>& names)
      : names_(names) {}

  Tensors run(const std::string& name,
              std::function<Tensors(const Tensors&)> function,
              const Tensors& inputs, const Modules& modules) override {
    if (std::find(names_.begin(), names_.end(), name) == names_.end()) {
      return function(inputs);
    }
    // The backward calls the function without a policy, so that regions inside
    // of it are plain calls in both runs.
    const RegionScope plain(nullptr);
    return checkpoint_list(std::move(function), inputs, {.modules = modules});
  }

 private:
  const std::vector<std::string>& names_;
};

/// Storages that autograd saved. A weak reference prevents the address of a
/// freed storage from being reused.
class SavedStorages {
 public:
  void add(const at::Tensor& tensor) {
    if (!tensor.has_storage()) return;
    const StorageKey key = tensor.storage().unsafeGetStorageImpl();
    if (list_.contains(key)) return;
    list_.emplace(
        key,
        Entry{tensor.storage().getWeakStorageImpl(),
              allocated_bytes(static_cast<int64_t>(tensor.storage().nbytes()),
                              tensor.device())});
  }
  void remove(const Tensors& tensors) {
    for (const auto& tensor : tensors) {
      if (tensor.defined() && tensor.has_storage()) {
        list_.erase(tensor.storage().unsafeGetStorageImpl());
      }
    }
  }
  int64_t bytes() const {
    int64_t sum = 0;
    for (const auto& [key, entry] : list_) sum += entry.bytes;
    return sum;
  }

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int64_t bytes;
  };
  std::unordered_map<StorageKey, Entry> list_;
};

/// Records the saved tensors of all regions that are running, and drops them.
class RegionMeter final : public RegionPolicy {
 public:
  RegionMeter(torch::Device device, const Modules& modules) : device_(device) {
    for (const auto& module : modules) {
      for (const auto& p : module->parameters()) state_.push_back(p);
      for (const auto& b : module->buffers()) state_.push_back(b);
    }
  }

  Tensors run(const std::string& name,
              std::function<Tensors(const Tensors&)> function,
              const Tensors& inputs, const Modules&) override {
    using Clock = std::chrono::steady_clock;
    SavedStorages saved;
    open_.push_back(&saved);
    compat::synchronize(device_);
    const auto start = Clock::now();
    Tensors outputs;
    try {
      outputs = function(inputs);
    } catch (...) {
      open_.pop_back();
      throw;
    }
    compat::synchronize(device_);
    const std::chrono::duration<double, std::milli> time = Clock::now() - start;
    open_.pop_back();
    saved.remove(inputs);
    saved.remove(outputs);
    saved.remove(state_);
    RegionCosts& costs = entry(name);
    costs.saved_bytes += saved.bytes();
    costs.forward_ms += time.count();
    return outputs;
  }

  void record(const at::Tensor& tensor) {
    for (SavedStorages* saved : open_) saved->add(tensor);
  }

  std::vector<RegionCosts> take() { return std::move(costs_); }

 private:
  RegionCosts& entry(const std::string& name) {
    for (auto& costs : costs_) {
      if (costs.name == name) return costs;
    }
    costs_.push_back({name, 0, 0});
    return costs_.back();
  }

  torch::Device device_;
  Tensors state_;  // parameters and buffers
  std::vector<SavedStorages*> open_;
  std::vector<RegionCosts> costs_;
};

class RecordedTensor final : public compat::SavedTensorHooks {
 public:
  explicit RecordedTensor(RegionMeter& meter) : meter_(&meter) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    meter_->record(tensor);
  }
  at::Tensor call_unpack_hook() override {
    TORCH_CHECK(false,
                "[measure_regions] expected a stage that runs no backward of "
                "its own, got one");
  }

 private:
  RegionMeter* meter_;  // used while the stage runs
};

class RecordingRegions final : public compat::SavedTensorPolicy {
 public:
  explicit RecordingRegions(RegionMeter& meter) : meter_(&meter) {}
  std::unique_ptr<compat::SavedTensorHooks> make_hooks() override {
    return std::make_unique<RecordedTensor>(*meter_);
  }

 private:
  RegionMeter* meter_;
};

/// The tensors between two stages.
struct RegionInputs {
  explicit RegionInputs(Tensors tensors) : values(std::move(tensors)) {
    for (auto& value : values) {
      requires_grad.push_back(value.defined() && value.requires_grad());
      if (value.defined()) value = value.detach();
    }
  }
  torch::Device device() const {
    for (const auto& value : values) {
      if (value.defined()) return value.device();
    }
    return torch::kCPU;
  }
  Tensors values;
  std::vector<bool> requires_grad;
};

/// Runs a stage and saves nothing. Returns its outputs.
Tensors run_measured(const Stage& stage, const RegionInputs& in,
                     RegionMeter& meter) {
  const RecomputeContext context(in.values, stage.modules());
  StageGraph graph;
  const RecomputeGuard guard(context);
  const compat::SavedTensorScope record(
      std::make_shared<RecordingRegions>(meter));
  const CurrentModules modules(stage.modules());
  const RegionScope scope(&meter);
  return stage(graph.begin(in.values, in.requires_grad));
}

double bytes_per_ms(const RegionCosts& costs) {
  constexpr double kLeastMs = 1e-6;  // resolution of the clock
  return static_cast<double>(costs.saved_bytes) /
         std::max(costs.forward_ms, kLeastMs);
}

/// Returns the costs of the regions of `stage` and its outputs.
std::pair<std::vector<RegionCosts>, Tensors> measure(const Stage& stage,
                                                     const RegionInputs& in) {
  RegionMeter warm_up(in.device(), stage.modules());
  Tensors outputs = run_measured(stage, in, warm_up);
  std::vector<RegionCosts> costs = warm_up.take();
  if (!costs.empty()) {
    outputs.clear();
    RegionMeter meter(in.device(), stage.modules());
    outputs = run_measured(stage, in, meter);
    costs = meter.take();
  }
  std::stable_sort(costs.begin(), costs.end(),
                   [](const RegionCosts& a, const RegionCosts& b) {
                     return bytes_per_ms(a) > bytes_per_ms(b);
                   });
  return {std::move(costs), std::move(outputs)};
}

void check_grad_mode(const char* call) {
  TORCH_CHECK(torch::GradMode::is_enabled(), "[", call,
              "] expected grad mode to be on, got off");
}

}  // namespace

Tensors region_list(const std::string& name,
                    std::function<Tensors(const Tensors&)> function,
                    const Tensors& inputs, const Modules& modules) {
  TORCH_CHECK(function, "[region] expected a function for '", name,
              "', got none");
  if (t_region_policy == nullptr || !torch::GradMode::is_enabled()) {
    return function(inputs);
  }
  return t_region_policy->run(name, std::move(function), inputs, modules);
}

std::vector<RegionCosts> measure_regions(const Stage& stage,
                                         const Tensors& inputs) {
  check_grad_mode("measure_regions");
  return measure(stage, RegionInputs(inputs)).first;
}

Stage with_region_variants(const Stage& stage,
                           const std::vector<std::string>& order,
                           int max_variants) {
  TORCH_CHECK(max_variants > 0,
              "[with_region_variants] expected at least one variant, got ",
              max_variants);
  Stage result = stage;
  const size_t variants =
      std::min(order.size(), static_cast<size_t>(max_variants));
  for (size_t v = 1; v <= variants; ++v) {
    const size_t count = (order.size() * v + variants - 1) / variants;
    std::vector<std::string> names(
        order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count));
    result = result.with_variant(
        fmt::format("{} of {} regions recomputed", count, order.size()),
        [function = stage.function(), names](const Tensors& inputs) {
          RecomputeRegions policy(names);
          const RegionScope scope(&policy);
          return function(inputs);
        });
  }
  return result;
}

Chain with_region_variants(const Chain& chain, const Tensors& inputs,
                           int max_variants) {
  check_grad_mode("with_region_variants");
  std::vector<Stage> stages;
  std::map<std::string, std::vector<std::string>> orders;  // by kind
  RegionInputs boundary(inputs);
  for (int i = 0; i < chain.size(); ++i) {
    const Stage& stage = chain[i];
    detail::check_input_count("with_region_variants", chain, i,
                              boundary.values.size());
    auto [costs, outputs] = measure(stage, boundary);
    std::vector<std::string> order;
    for (const RegionCosts& region : costs) {
      if (region.saved_bytes > 0) order.push_back(region.name);
    }
    if (!stage.kind().empty()) {
      order = orders.emplace(stage.kind(), order).first->second;
    }
    stages.push_back(with_region_variants(stage, order, max_variants));
    boundary = RegionInputs(std::move(outputs));
  }
  return Chain(std::move(stages));
}

}  // namespace reprise
