#include "recompute/recompute_context.h"

#include <reprise/memory/meter.h>
#include <reprise/recompute/checkpoint.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <unordered_set>
#include <utility>

namespace reprise {
namespace {

thread_local bool t_recomputing = false;
thread_local bool t_outputs_unused = false;
thread_local int64_t t_asked = 0;
thread_local const Modules* t_modules = nullptr;

/// Runs on one device.
struct DeviceRuns {
  std::atomic<int> threads{0};        // that are in a run
  std::atomic<uint64_t> overlaps{0};  // counts runs that began during others
};
constexpr size_t kMostDevices = 65;  // the CPU and CUDA devices
thread_local int64_t t_copied_bytes = 0;
thread_local int t_run_depth = 0;
thread_local DeviceRuns* t_runs = nullptr;  // of the outermost run
thread_local uint64_t t_overlaps_before = 0;

DeviceRuns& runs_on(c10::Device device) {
  static std::array<DeviceRuns, kMostDevices> all;
  const size_t slot =
      device.is_cpu()
          ? 0
          : 1 + static_cast<size_t>(std::max<int>(0, device.index()));
  return all.at(std::min(slot, kMostDevices - 1));
}

c10::Device device_of(const Tensors& tensors) {
  for (const auto& tensor : tensors) {
    if (tensor.defined() && !tensor.is_cpu()) return tensor.device();
  }
  return c10::Device(c10::kCPU);
}

}  // namespace

RunScope::RunScope(const Tensors& inputs) : RunScope(device_of(inputs)) {}

RunScope::RunScope(c10::Device device) {
  if (t_run_depth++ > 0) return;
  t_runs = &runs_on(device);
  // In this order, so that of two runs that begin at once both see it.
  t_overlaps_before = t_runs->overlaps.load();
  if (t_runs->threads.fetch_add(1) > 0) ++t_runs->overlaps;
}

RunScope::~RunScope() {
  if (--t_run_depth == 0) --t_runs->threads;
}

bool RunScope::overlapped() {
  return t_run_depth > 0 && t_runs->overlaps.load() != t_overlaps_before;
}

bool outputs_unused() {
  ++t_asked;
  return t_outputs_unused;
}

int64_t OutputsUnused::asked() {
  return t_asked;
}

OutputsUnused::OutputsUnused(bool unused)
    : before_(std::exchange(t_outputs_unused, unused)) {}

OutputsUnused::~OutputsUnused() {
  t_outputs_unused = before_;
}

bool is_recomputing() {
  return t_recomputing;
}

RecomputeContext::RecomputeContext(const Tensors& inputs,
                                   const Modules& modules,
                                   const std::vector<at::Generator>& generators)
    : device_(device_of(inputs)),
      rng_(compat::RngState::capture(inputs, generators)),
      autocast_(compat::AutocastState::current()) {
  std::unordered_set<const void*> seen;
  for (const auto& root : modules) {
    for (const auto& module : root->modules()) {
      for (const torch::Tensor& p : module->parameters(/*recurse=*/false)) {
        if (!p.defined() || p.is_inference()) continue;
        parameters_.push_back({p, p._version()});
      }
      if (!module->is_training()) continue;
      for (const torch::Tensor& buffer : module->buffers(/*recurse=*/false)) {
        if (!buffer.defined() ||
            !seen.insert(buffer.unsafeGetTensorImpl()).second) {
          continue;
        }
        buffers_.push_back({buffer, buffer.variable_data().clone()});
      }
    }
  }
  t_copied_bytes += buffer_bytes();
}

int64_t RecomputeContext::made_on_thread() {
  return t_copied_bytes;
}

int64_t RecomputeContext::buffer_bytes() const {
  int64_t bytes = 0;
  for (const auto& buffer : buffers_) {
    bytes +=
        allocated_bytes(static_cast<int64_t>(buffer.before.storage().nbytes()),
                        buffer.before.device());
  }
  return bytes;
}

void RecomputeContext::finish_first_run() {
  rng_.forget_unchanged(compat::RngState::capture_like(rng_));
  TORCH_CHECK(
      rng_.empty() || !RunScope::overlapped(),
      "[recompute] expected one thread at a time to run stages that use "
      "random numbers, got two; threads share LibTorch's generators, so "
      "that no recomputation could repeat its numbers: train one model "
      "after the other, or in two processes");
}

// Buffers are swapped instead of copied back. The recomputation works on a copy
// of the value before the first run, and the current storage is put back
// unchanged. No version counter changes, so that autograd graphs that saved a
// buffer stay valid.
RecomputeGuard::RecomputeGuard(const RecomputeContext& context)
    : run_(context.device_),
      rng_(context.rng_),
      autocast_(context.autocast_),
      grad_mode_(true),
      was_recomputing_(t_recomputing) {
  for (const auto& parameter : context.parameters_) {
    TORCH_CHECK(parameter.tensor._version() == parameter.version,
                "[recompute] expected parameters to stay as they were in the "
                "forward, got one of shape ",
                parameter.tensor.sizes(),
                " that was modified in place before its backward; update "
                "parameters after the backward");
  }
  // Make all copies first, so that no buffer has been swapped if one of them
  // fails.
  Tensors copies;
  for (const auto& buffer : context.buffers_) {
    copies.push_back(buffer.before.clone());
    buffers_.emplace_back(buffer.tensor, buffer.tensor.variable_data());
  }
  for (size_t i = 0; i < copies.size(); ++i) {
    buffers_[i].first.set_data(copies[i]);
  }
  t_recomputing = true;
}

RecomputeGuard::~RecomputeGuard() {
  t_recomputing = was_recomputing_;
  for (auto& [tensor, now] : buffers_) tensor.set_data(now);
}

CurrentModules::CurrentModules(const Modules& modules) : before_(t_modules) {
  t_modules = &modules;
}

CurrentModules::~CurrentModules() {
  t_modules = before_;
}

const Modules& CurrentModules::get() {
  static const Modules none;
  if (t_modules == nullptr) return none;
  return *t_modules;
}

}  // namespace reprise
