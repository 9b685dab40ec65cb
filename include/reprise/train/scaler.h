#pragma once

#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace reprise {

/// Loss scaling for fp16. Gradients are computed from loss × scale, so that small
/// values do not underflow, and divided by the scale before the update. An update
/// with non-finite gradients is skipped and the scale multiplied by `backoff`; after
/// `growth_interval` finite updates it is multiplied by `growth`.
///
///     (loss * scaler.scale()).backward();
///     if (scaler.unscale(parameters)) optimizer.step();
///     scaler.update();
class GradScaler {
 public:
  struct Options {
    bool enabled = true;  ///< if false: scale 1, no checks
    double scale = 65536;
    double growth = 2;
    double backoff = 0.5;
    int64_t growth_interval = 2000;
  };
  /// State saved in checkpoints.
  struct State {
    double scale = 1;
    int64_t good_updates = 0;  ///< finite updates since the scale last changed
    int64_t skipped = 0;       ///< skipped updates in total
    bool operator==(const State&) const = default;
  };

  GradScaler() : GradScaler(Options{}) {}
  /// Throws c10::Error if an option is out of range.
  explicit GradScaler(const Options& options);

  double scale() const { return state_.scale; }

  /// Divides the gradients of `parameters` by the scale and returns whether all are
  /// finite, which synchronizes with the device. `parameters` has no duplicates;
  /// those without a gradient are skipped. To be called once per window. Returns
  /// true at once if the scaler is disabled.
  bool unscale(const std::vector<torch::Tensor>& parameters);

  /// Replaces the result of unscale() by the one that all ranks agreed on. To be
  /// called between unscale() and update().
  void agree(bool finite);

  /// Adjusts the scale after a window, given the result of unscale(). Throws
  /// c10::Error if gradients are not finite even with the smallest scale.
  void update();

  const State& state() const { return state_; }

  /// Restores a saved state. A disabled scaler keeps its scale of 1.
  void load(const State& state);

 private:
  Options options_;
  State state_;
  std::optional<bool> finite_;  // result of unscale() for this window
};

}  // namespace reprise
