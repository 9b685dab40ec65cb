#pragma once

#include <reprise/observe/observation.h>
#include <reprise/observe/probe.h>

#include <memory>
#include <string>

namespace reprise {

struct ObserverOptions {
  /// Sampling interval in milliseconds, from 1 to 3,600,000.
  double interval_ms = 50;
  /// Maximum CPU time of the observer as a fraction of the training time. Samples
  /// that would exceed it are skipped, except at the ends of an interval.
  double max_cost = 0.01;
};

/// Samples a device at a fixed interval from a background thread:
///
///     Observer observer("cuda:0");  // Takes the baseline before the model exists.
///     ...                           // Create the model and the data, warm up.
///     observer.begin();
///     ...                           // Train.
///     observer.pause();
///     evaluate();
///     observer.resume();
///     ...
///     const Observation observed = observer.end();
///
/// A sample is taken at both ends of every interval, so that intervals shorter
/// than the sampling interval are covered. On CUDA, the caller must synchronize
/// with the device before begin(), pause() and end(). The background thread does
/// not call LibTorch. Not thread-safe.
class Observer {
 public:
  /// `device` is passed to make_probe(). Takes the baseline, which lasts some
  /// milliseconds. The memory in use now is subtracted from later samples. If
  /// this process has no CUDA context yet, the context counts as memory of the
  /// training. Throws c10::Error if an option is out of range.
  explicit Observer(const std::string& device, ObserverOptions options = {});
  explicit Observer(std::unique_ptr<DeviceProbe> probe,
                    ObserverOptions options = {});
  /// Stops the thread.
  ~Observer();
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;

  /// Takes the baseline again. Throws c10::Error after begin().
  void take_baseline();

  /// Starts the observation. Throws c10::Error if called twice.
  void begin();

  /// Excludes the time until resume() from the training. Both return false if
  /// they have no effect: outside of begin() and end(), or if already paused or
  /// not paused.
  bool pause();
  bool resume();

  /// Ends the observation and stops the thread. If the device reports its
  /// utilisation with a delay, waits up to 1.2 s for it; this time is not counted
  /// as training. Throws c10::Error before begin(). Later calls return the same
  /// result.
  Observation end();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace reprise
