#pragma once

#include "compat/autocast.h"
#include "compat/rng.h"

#include <reprise/recompute/stage.h>

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace reprise {

/// Records what a forward run depends on besides its inputs: the states of
/// random generators, the buffers of its modules and the autocast mode. A
/// RecomputeGuard restores them for a recomputation. Parameters are not copied,
/// but must not have changed.
class RecomputeContext {
 public:
  /// Records the state before the first run. Copies the buffers of modules in
  /// training mode; other modules do not update theirs.
  RecomputeContext(const Tensors& inputs, const Modules& modules,
                   const std::vector<at::Generator>& generators = {});

  /// Call after the first run, within its RunScope. Discards the states of
  /// generators that were not used. Throws c10::Error if some were, and another
  /// thread may have used them meanwhile.
  void finish_first_run();

  /// Returns the bytes of the buffers' copies. A RecomputeGuard needs the same
  /// amount.
  int64_t buffer_bytes() const;

  /// Returns the sum of buffer_bytes() over all objects that this thread has made
  /// so far, to measure what a run makes.
  static int64_t made_on_thread();

 private:
  friend class RecomputeGuard;
  c10::Device device_;  // of the inputs
  struct Buffer {
    torch::Tensor tensor;  // the module's buffer
    torch::Tensor before;  // copy of its value before the first run
  };
  compat::RngState rng_;
  compat::AutocastState autocast_;
  struct Parameter {
    torch::Tensor tensor;
    int64_t version = 0;  // before the first run
  };
  std::vector<Buffer> buffers_;
  std::vector<Parameter> parameters_;
};

/// Encloses a run whose random numbers a RecomputeContext records or restores.
/// Threads share LibTorch's generators: if such runs of two threads on one device
/// overlap, and random numbers are drawn, neither can be repeated. Then
/// RecomputeContext::finish_first_run() throws.
class RunScope {
 public:
  explicit RunScope(const Tensors& inputs);
  explicit RunScope(c10::Device device);
  ~RunScope();
  RunScope(const RunScope&) = delete;
  RunScope& operator=(const RunScope&) = delete;

  /// Returns whether a run of another thread has overlapped with the outermost
  /// one of this thread.
  static bool overlapped();
};

/// Restores the state of `context` for a recomputation on this thread, with
/// grad mode on. The destructor restores generators, buffers and modes to their
/// state before. Throws c10::Error if a parameter was modified in place since the
/// first run, because the gradients would be those of neither value.
class RecomputeGuard {
 public:
  explicit RecomputeGuard(const RecomputeContext& context);
  ~RecomputeGuard();
  RecomputeGuard(const RecomputeGuard&) = delete;
  RecomputeGuard& operator=(const RecomputeGuard&) = delete;

 private:
  RunScope run_;
  compat::RngGuard rng_;
  compat::AutocastGuard autocast_;
  torch::AutoGradMode grad_mode_;
  // Buffer, current value.
  std::vector<std::pair<torch::Tensor, torch::Tensor>> buffers_;
  bool was_recomputing_;
};

/// Sets the value of outputs_unused() on this thread.
class OutputsUnused {
 public:
  explicit OutputsUnused(bool unused);
  ~OutputsUnused();
  OutputsUnused(const OutputsUnused&) = delete;
  OutputsUnused& operator=(const OutputsUnused&) = delete;

  /// Number of calls of outputs_unused() on this thread.
  static int64_t asked();

 private:
  bool before_;
};

/// Sets the modules of the stage that this thread is running. checkpoint() uses
/// them if no modules are given in its options.
class CurrentModules {
 public:
  explicit CurrentModules(const Modules& modules);
  ~CurrentModules();
  CurrentModules(const CurrentModules&) = delete;
  CurrentModules& operator=(const CurrentModules&) = delete;

  static const Modules& get();

 private:
  const Modules* before_;
};

}  // namespace reprise
