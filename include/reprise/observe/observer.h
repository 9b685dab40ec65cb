#pragma once

#include <reprise/observe/observation.h>
#include <reprise/observe/probe.h>

#include <memory>
#include <string>

namespace reprise {

struct ObserverOptions {
  double interval_ms = 50;
  /// Of the training time. Looks that would cost more CPU time are left out;
  /// those at the ends of a part are not.
  double max_cost = 0.01;
};

/// Looks at a device at a fixed interval, from a thread beside the training:
///
///     Observer observer("cuda:0");  // the baseline, before the model is there
///     ...                           // model, data, warming up
///     observer.begin();
///     observer.pause();
///     evaluate();
///     observer.resume();
///     const Observation seen = observer.end();
///
/// There is a look at both ends of every part, so that a part shorter than the
/// interval is seen too. On CUDA wait for the device before begin(), pause() and
/// end(), or work goes on on the wrong side of them. The thread calls nothing of
/// LibTorch. All members are for one thread at a time.
class Observer {
 public:
  /// `device` as for make_probe(). Takes the baseline: some milliseconds. What
  /// is in use now is taken off later, so on CUDA the process's own context
  /// counts as the training's if it does not exist yet.
  explicit Observer(const std::string& device, ObserverOptions options = {});
  explicit Observer(std::unique_ptr<DeviceProbe> probe,
                    ObserverOptions options = {});
  /// Stops the thread.
  ~Observer();
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;

  /// Once more; only before begin().
  void take_baseline();

  /// The training part starts. Once; throws c10::Error otherwise.
  void begin();

  /// What follows is no training, until resume(). False where nothing changed:
  /// outside of begin() and end(), or aside already.
  bool pause();
  bool resume();

  /// The training part is over; the thread is gone. Where the device tells of
  /// its utilisation late, waits for it, 1.2 s at most, which is not the
  /// training's time. Throws c10::Error before begin(); may be called again, with
  /// the same answer.
  Observation end();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace reprise
