#pragma once

#include <reprise/observe/probe.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace reprise {

/// Measurements of a device during a training, as documented in docs/results.md.
struct Observation {
  struct Values {
    std::optional<int64_t> memory_bytes;
    std::optional<double> utilisation;  ///< percent
    std::optional<double> power_w, clock_mhz;
  };
  /// Every list has the length of `t_s`, or is empty if the value is unavailable.
  struct Series {
    std::vector<double> t_s;  ///< training time, excluding paused intervals
    std::vector<int64_t> memory_bytes;
    std::vector<double> utilisation, power_w, clock_mhz;
  };

  std::string source;  ///< "nvml" or "process"
  double interval_ms = 0;
  int64_t samples = 0;
  double seconds = 0;  ///< training time
  double cost = 0;     ///< CPU seconds spent on observing / `seconds`
  /// Memory in use before the training; subtracted from all memory values below.
  std::optional<int64_t> baseline_bytes;
  Values average, peak;  ///< the average is weighted by time
  Series series;
};

/// JSON object {"observed": {...}, "series": {...}} as documented in
/// docs/results.md.
std::string to_json(const Observation& observation);

/// Human-readable table of the averages and peaks.
std::string to_table(const Observation& observation);

/// Aggregates samples into an Observation. Average and peak cover all samples.
/// The series has at most `kPoints` points, so that the memory does not grow with
/// the length of the training: adjacent samples are merged into one point, which
/// has the maximum of their memory and the mean of the other values. Delayed
/// utilisation is averaged over the time since the previous point.
class Recording {
 public:
  static constexpr size_t kPoints = 300;

  explicit Recording(std::optional<int64_t> baseline_bytes = {});

  /// Adds a sample at training time `t_s`, which must not decrease. A value is
  /// weighted with the time since the previous one. Memory below the baseline
  /// counts as zero. Delayed values in the sample are added too.
  void add(double t_s, const DeviceSample& sample);

  /// Adds a delayed value, weighted with its own interval.
  void add(const PastUtilisation& past);

  int64_t samples() const { return samples_; }

  /// Sets baseline, samples, average, peak and series of `observation`. A point
  /// without a value takes that of the previous point or, at the beginning, that
  /// of the first point with a value.
  void write_to(Observation& observation) const;

 private:
  enum { kMemory, kUtilisation, kPower, kClock, kValues };
  struct Aggregate {
    double since_s = 0, weighted = 0, weight = 0, sum = 0, peak = 0;
    int64_t count = 0;
  };
  struct Point {
    double t_sum = 0;
    double last_s = 0;  // time of its last sample
    int64_t samples = 0;
    double sum[kValues] = {};  // memory: the maximum
    int64_t count[kValues] = {};
  };
  /// One or more merged delayed values. There may be gaps between them.
  struct Interval {
    double from_s = 0, to_s = 0, weighted = 0, weight = 0;
    int64_t count = 0;
  };
  static void merge(Point& into, const Point& other);
  static void merge(Interval& into, const Interval& other);
  template <class Item>
  static void merge_pairs(std::vector<Item>& items);
  /// Adds the delayed utilisation to the points of the same time.
  void add_past_to(std::vector<Point>& points) const;

  std::optional<int64_t> baseline_;
  int64_t samples_ = 0;
  Aggregate aggregates_[kValues];
  std::vector<Point> points_;
  int64_t per_point_ = 1;
  std::vector<Interval> past_;
  int64_t per_interval_ = 1;
};

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
///     make_model();                 // And the data; warm up.
///     observer.begin();
///     train();
///     observer.pause();
///     evaluate();
///     observer.resume();
///     train();
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
