#pragma once

#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace reprise {

/// Loss scaling for fp16: gradients are computed of loss × scale, so that small
/// ones do not vanish, and divided again before the update. An update whose
/// gradients are not all finite is skipped and the scale halved; after
/// `growth_interval` good ones it is doubled.
///
///     accumulate with scaler.scale() as a factor of the loss
///     if (scaler.unscale(parameters)) { clip; optimizer.step(); }
///     scaler.update();
class GradScaler {
 public:
  struct Options {
    bool enabled = true;  ///< off: scale 1, nothing is checked
    double scale = 65536;
    double growth = 2;
    double backoff = 0.5;
    int64_t growth_interval = 2000;
  };
  /// What is saved and resumed.
  struct State {
    double scale = 1;
    int64_t good_updates = 0;  ///< since the last change of the scale
    int64_t skipped = 0;       ///< in all
    bool operator==(const State&) const = default;
  };

  GradScaler() : GradScaler(Options{}) {}
  /// Throws c10::Error where an option is out of range.
  explicit GradScaler(const Options& options);

  double scale() const { return state_.scale; }

  /// Divides the gradients of `parameters` (each named once; those without one
  /// are left alone) by the scale. True where all are finite; waits for the
  /// device to know. Once a window. Off: true at once.
  bool unscale(const std::vector<torch::Tensor>& parameters);

  /// Where others have found gradients of the same window not finite, so that all
  /// skip it. Between unscale() and update().
  void agree(bool finite);

  /// After the window: adjusts the scale by what unscale() found. Throws
  /// c10::Error where no scale, however small, makes the gradients finite.
  void update();

  const State& state() const { return state_; }

  /// Goes on from there. One that is off keeps its scale of 1.
  void load(const State& state);

 private:
  Options options_;
  State state_;
  std::optional<bool> finite_;  // of this window, once unscaled
};

}  // namespace reprise
