#pragma once

#include "train/store/metrics.h"

#include <reprise/train/trainer.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace reprise::detail {

/// Reports a training to its listener and its metrics files. Tested by
/// tests/train/loop/trainer_test.cpp.
class Reporter {
 public:
  /// Sets the listener, which is not owned and may be null. It gets the warnings of the time
  /// before.
  void set_listener(TrainListener* listener);
  TrainListener* listener() const { return listener_; }

  /// Opens the metrics files; see Metrics.
  void open_metrics(const RunDirectory* directory, int64_t keep_bytes,
                    const std::string& tensorboard, torch::Device device) {
    metrics_.emplace(directory, keep_bytes, tensorboard, listener_, device);
  }
  Metrics& metrics() { return *metrics_; }

  void started(const TrainListener::Start& start) {
    if (listener_ != nullptr) listener_->started(start);
  }
  void warn(const std::string& text) {
    if (listener_ != nullptr) {
      listener_->warned(text);
    } else if (!started_) {
      early_warnings_.push_back(text);
    }
  }
  void saved(const std::string& text) {
    if (listener_ != nullptr) listener_->saved(text);
  }
  void evaluated(const TrainListener::Evaluation& evaluation) {
    if (listener_ != nullptr) listener_->evaluated(evaluation);
  }
  void updated(int64_t step) {
    if (listener_ != nullptr) listener_->updated(step);
  }
  void stepped(const TrainListener::Step& step) {
    if (listener_ != nullptr) listener_->stepped(step);
  }

  /// Steady training begins. From now on, training() calls the listener.
  void begin_training() {
    if (running_) return;
    running_ = true;
    training(true);
  }
  void end_training() {
    training(false);
    running_ = false;
  }
  /// Training pauses (false) for an evaluation or a save, or continues.
  void training(bool active) {
    if (listener_ != nullptr && running_) listener_->training(active);
  }

  /// Returns whether the listener's next step is due, or `now` is true. If so,
  /// starts the next interval.
  bool step_due(bool now);

 private:
  TrainListener* listener_ = nullptr;  // not owned
  bool started_ = false;               // set_listener() was called
  std::vector<std::string> early_warnings_;
  std::optional<Metrics> metrics_;
  bool running_ = false;
  std::chrono::steady_clock::time_point last_step_ =
      std::chrono::steady_clock::now();
};

}  // namespace reprise::detail
