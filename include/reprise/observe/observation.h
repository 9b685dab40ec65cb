#pragma once

#include <reprise/observe/probe.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace reprise {

/// What was seen of a device over a training part: see docs/results.md.
struct Observation {
  struct Values {
    std::optional<int64_t> memory_bytes;
    std::optional<double> utilisation;  ///< percent
    std::optional<double> power_w, clock_mhz;
  };
  /// A list is empty where nothing was seen, else as long as `t_s`.
  struct Series {
    std::vector<double> t_s;  ///< training time, without the parts aside
    std::vector<int64_t> memory_bytes;
    std::vector<double> utilisation, power_w, clock_mhz;
  };

  std::string source;  ///< "nvml" or "process"
  double interval_ms = 0;
  int64_t samples = 0;
  double seconds = 0;  ///< of training
  double cost = 0;     ///< CPU seconds spent on observing / `seconds`
  std::optional<int64_t> baseline_bytes;  ///< taken off all memory below
  Values average, peak;                   ///< average over time
  Series series;
};

/// {"observed": {…}, "series": {…}} as in docs/results.md.
std::string to_json(const Observation& observation);

/// For people: average and peak of what was seen.
std::string to_table(const Observation& observation);

/// Adds up samples. Average and peak are of all samples; the series has at most
/// `kPoints` points at any length, so that a long training costs no memory:
/// neighbouring samples become one point, with the largest of their memory and
/// the mean of everything else. Utilisation that was told of later is the mean
/// over the time since the point before.
class Recording {
 public:
  static constexpr size_t kPoints = 300;

  explicit Recording(std::optional<int64_t> baseline_bytes = {});

  /// `t_s`: of training, never falling. A value stands for the time since its
  /// last one. Memory below the baseline counts as zero. What the sample says of
  /// the past is added as below.
  void add(double t_s, const DeviceSample& sample);

  /// Stands for its own time, which may be before that of samples; no sample.
  void add(const PastUtilisation& past);

  int64_t samples() const { return samples_; }

  /// Fills baseline, samples, average, peak and series. A point without a value
  /// has that of the point before, the first ones that of the point after.
  void write_to(Observation& observation) const;

 private:
  enum { kMemory, kUtilisation, kPower, kClock, kValues };
  struct Figure {
    double since_s = 0, weighted = 0, weight = 0, sum = 0, peak = 0;
    int64_t count = 0;
  };
  struct Point {
    double t_sum = 0;
    double last_s = 0;  ///< time of its last sample
    int64_t samples = 0;
    double sum[kValues] = {};  ///< memory: the largest
    int64_t count[kValues] = {};
  };
  /// One or more that were told of later. Stretches may have holes in them.
  struct Stretch {
    double from_s = 0, to_s = 0, weighted = 0, weight = 0;
    int64_t count = 0;
  };
  static void merge(Point& into, const Point& other);
  static void merge(Stretch& into, const Stretch& other);
  template <class Item>
  static void merge_pairs(std::vector<Item>& items);
  /// Gives points the utilisation of the time that they stand for.
  void spread_past(std::vector<Point>& points) const;

  std::optional<int64_t> baseline_;
  int64_t samples_ = 0;
  Figure figures_[kValues];
  std::vector<Point> points_;
  int64_t per_point_ = 1;
  std::vector<Stretch> past_;
  int64_t per_stretch_ = 1;
};

}  // namespace reprise
