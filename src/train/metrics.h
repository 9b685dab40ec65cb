#pragma once

#include <reprise/train/run_directory.h>
#include <reprise/train/tensorboard.h>
#include <reprise/train/trainer.h>

#include <torch/types.h>

#include <memory>
#include <optional>
#include <vector>

namespace reprise::train_detail {

/// The figures of each update, on their way from the device to the run's files.
/// They are fetched in groups, so that training need not wait for each.
class Metrics {
 public:
  /// `directory` null: nothing is written. `tensorboard` empty: no events.
  Metrics(const RunDirectory* directory, int64_t keep_bytes,
          const std::string& tensorboard, TrainListener* listener);

  /// `loss` and `norm` are scalars on the device; `norm` may be undefined.
  void add(int64_t step, const torch::Tensor& loss, const torch::Tensor& norm,
           double rate, int64_t samples);
  void add(const TrainListener::Evaluation& evaluation);

  /// Fetches and writes what was added; waits for the device.
  void flush();

  /// Length of the file; forces it to disk.
  int64_t synced_bytes();

  std::optional<double> last_loss() const { return last_loss_; }

 private:
  struct Pending {
    int64_t step;
    torch::Tensor loss, norm;
    double rate;
    int64_t samples;
  };
  void write(const std::string& line);
  void warn(const std::string& text);

  std::optional<MetricsLog> log_;
  std::unique_ptr<EventWriter> events_;
  TrainListener* listener_;
  std::vector<Pending> pending_;
  std::optional<double> last_loss_;
  bool warned_of_loss_ = false;
  bool warned_of_log_ = false;
};

}  // namespace reprise::train_detail
