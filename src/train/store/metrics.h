#pragma once

#include "compat/cuda.h"
#include "train/store/metrics_log.h"
#include "train/store/tensorboard.h"

#include <reprise/train/run_directory.h>
#include <reprise/train/trainer.h>

#include <torch/types.h>

#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <vector>

namespace reprise::detail {

/// Writes the metrics of each update to the files of a run. They are copied
/// from the device in groups, so that the training does not wait for the device
/// after each update. Pending values are stored in a tensor of fixed size, so
/// that memory use does not depend on when they are copied. Tested by
/// tests/train/store/metrics_test.cpp and tests/train/loop/trainer_test.cpp.
class Metrics {
 public:
  /// Maximum number of pending updates.
  static constexpr int64_t kMostPending = 256;
  /// Device memory of the tensor of pending values.
  static constexpr int64_t kDeviceBytes =
      kMostPending * 2 * static_cast<int64_t>(sizeof(double));

  /// If `directory` is null, no metrics file is written; if `tensorboard` is
  /// empty, no event file. The metrics file is truncated to `keep_bytes`.
  /// `listener` receives warnings; it is not owned and may be null.
  Metrics(const RunDirectory* directory, int64_t keep_bytes,
          const std::string& tensorboard, TrainListener* listener,
          torch::Device device);

  /// Adds the metrics of an update. `loss` and `norm` are scalars on the
  /// device; `norm` may be undefined. Allocates no device memory. Must not be
  /// called while full().
  void add(int64_t step, const torch::Tensor& loss, const torch::Tensor& norm,
           double rate, int64_t samples);
  bool full() const { return std::ssize(pending_) == kMostPending; }
  void add(const TrainListener::Evaluation& evaluation);

  /// Copies pending metrics from the device and writes them. Waits for the
  /// device.
  void flush();

  /// Writes the metrics that the last collect() has begun to copy, and begins to copy those
  /// added since. A device that is at most one such interval behind the host is never idle
  /// for it. On the CPU the same as flush().
  void collect();

  /// Flushes the metrics file to disk and returns its length. A failure is only reported.
  int64_t synced_bytes();

  std::optional<double> last_loss() const { return last_loss_; }

 private:
  struct Pending {
    int64_t step;
    bool has_norm;
    double rate;
    int64_t samples;
  };
  /// Copies from the device that collect() has begun.
  struct Copying {
    std::vector<Pending> pending;
    compat::CudaEvent end;
  };
  void finish_copying();
  void write(const std::vector<Pending>& pending, const torch::Tensor& values);
  void write(const std::string& line);
  void write_events(const std::function<void(EventWriter&)>& values);
  /// Runs `writing`. A full disk must not end the training: its error is only
  /// reported, and once until a write succeeds again.
  void guard(bool& warned, const std::function<void()>& writing);
  void warn(const std::string& text);

  std::optional<MetricsLog> log_;
  std::unique_ptr<EventWriter> events_;
  TrainListener* listener_;
  std::vector<Pending> pending_;
  torch::Tensor values_;  // (kMostPending, 2) doubles: loss and norm
  torch::Tensor copied_;  // the same, pinned; undefined before collect()
  std::optional<Copying> copying_;
  std::optional<double> last_loss_;
  bool warned_of_loss_ = false;
  bool warned_of_log_ = false;
  bool warned_of_sync_ = false;
  bool warned_of_events_ = false;
};

}  // namespace reprise::detail
