#pragma once

#include "train/store/tensorboard.h"

#include <reprise/train/run_directory.h>
#include <reprise/train/trainer.h>

#include <torch/types.h>

#include <iterator>
#include <memory>
#include <optional>
#include <vector>

namespace reprise::detail {

/// The figures of each update, on their way from the device to the run's files.
/// They are fetched in groups, so that training need not wait for each. What waits on
/// the device has a tensor of its own, so that a training's memory does not depend on
/// when it is fetched.
class Metrics {
 public:
  /// Updates that can wait.
  static constexpr int64_t kMostPending = 256;
  /// What waits takes on the device, always.
  static constexpr int64_t kDeviceBytes =
      kMostPending * 2 * static_cast<int64_t>(sizeof(double));

  /// `directory` null: nothing is written. `tensorboard` empty: no events.
  Metrics(const RunDirectory* directory, int64_t keep_bytes,
          const std::string& tensorboard, TrainListener* listener,
          torch::Device device);

  /// `loss` and `norm` are scalars on the device; `norm` may be undefined. Allocates
  /// nothing. Not while full().
  void add(int64_t step, const torch::Tensor& loss, const torch::Tensor& norm,
           double rate, int64_t samples);
  bool full() const { return std::ssize(pending_) == kMostPending; }
  void add(const TrainListener::Evaluation& evaluation);

  /// Fetches and writes what was added; waits for the device.
  void flush();

  /// Length of the file; forces it to disk.
  int64_t synced_bytes();

  std::optional<double> last_loss() const { return last_loss_; }

 private:
  struct Pending {
    int64_t step;
    bool has_norm;
    double rate;
    int64_t samples;
  };
  void write(const std::string& line);
  void warn(const std::string& text);

  std::optional<MetricsLog> log_;
  std::unique_ptr<EventWriter> events_;
  TrainListener* listener_;
  std::vector<Pending> pending_;
  torch::Tensor values_;  // (kMostPending, 2) doubles: loss and norm
  std::optional<double> last_loss_;
  bool warned_of_loss_ = false;
  bool warned_of_log_ = false;
};

}  // namespace reprise::detail
