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

/// What a forward run depends on besides its inputs: states of random
/// generators, buffers of its modules, autocast. Recorded at the first run, it
/// makes every later run the same run.
class RecomputeContext {
 public:
  /// Before the first run. Copies the buffers of those modules that are in
  /// training mode (others do not change theirs).
  RecomputeContext(const Tensors& inputs, const Modules& modules,
                   const std::vector<at::Generator>& generators = {});

  /// After the first run: forgets generators that were not used.
  void finish_first_run();

  /// Bytes of the buffers' copies. A RecomputeGuard takes as many again.
  int64_t buffer_bytes() const;

 private:
  friend class RecomputeGuard;
  struct Buffer {
    torch::Tensor tensor;  // the module's own
    torch::Tensor before;  // its value before the first run
  };
  compat::RngState rng_;
  compat::AutocastState autocast_;
  std::vector<Buffer> buffers_;
};

/// While it lives, the thread stands where the first run began, with grad mode
/// on; afterwards generators, buffers and modes are as if nothing had run.
class RecomputeGuard {
 public:
  explicit RecomputeGuard(const RecomputeContext& context);
  ~RecomputeGuard();
  RecomputeGuard(const RecomputeGuard&) = delete;
  RecomputeGuard& operator=(const RecomputeGuard&) = delete;

 private:
  compat::RngGuard rng_;
  compat::AutocastGuard autocast_;
  torch::AutoGradMode grad_mode_;
  std::vector<std::pair<torch::Tensor, torch::Tensor>> buffers_;  // tensor, now
  bool was_recomputing_;
};

/// The modules of the stage that this thread runs at present. A checkpoint()
/// inside a stage that names no modules of its own protects these.
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
