#include <reprise/observe/observation.h>

#include <algorithm>
#include <cmath>

namespace reprise {

Recording::Recording(std::optional<int64_t> baseline_bytes)
    : baseline_(baseline_bytes) {
  points_.reserve(2 * kPoints);  // the thread that adds takes no memory
}

void Recording::merge(Point& into, const Point& other) {
  into.t_sum += other.t_sum;
  into.samples += other.samples;
  for (int i = 0; i < kValues; ++i) {
    if (i == kMemory) {
      if (other.count[i] > 0) {
        into.sum[i] = into.count[i] > 0 ? std::max(into.sum[i], other.sum[i])
                                        : other.sum[i];
      }
    } else {
      into.sum[i] += other.sum[i];
    }
    into.count[i] += other.count[i];
  }
}

void Recording::merge_pairs(std::vector<Point>& points) {
  const size_t pairs = (points.size() + 1) / 2;
  for (size_t i = 0; i < pairs; ++i) {
    Point point = points[2 * i];
    if (2 * i + 1 < points.size()) merge(point, points[2 * i + 1]);
    points[i] = point;
  }
  points.resize(pairs);
}

void Recording::add(double t_s, const DeviceSample& sample) {
  std::optional<double> values[kValues] = {std::nullopt, sample.utilisation,
                                           sample.power_w, sample.clock_mhz};
  if (sample.memory_bytes) {
    values[kMemory] = static_cast<double>(
        std::max<int64_t>(0, *sample.memory_bytes - baseline_.value_or(0)));
  }
  Point point;
  point.t_sum = t_s;
  point.samples = 1;
  for (int i = 0; i < kValues; ++i) {
    if (!values[i]) continue;
    const double value = *values[i];
    Figure& figure = figures_[i];
    const double weight = t_s - figure.since_s;
    figure.since_s = t_s;
    figure.weighted += weight * value;
    figure.weight += weight;
    figure.sum += value;
    figure.peak = figure.count == 0 ? value : std::max(figure.peak, value);
    ++figure.count;
    point.sum[i] = value;
    point.count[i] = 1;
  }
  ++samples_;
  if (points_.empty() || points_.back().samples == per_point_) {
    if (points_.size() == 2 * kPoints) {
      merge_pairs(points_);
      per_point_ *= 2;
    }
    points_.push_back(point);
  } else {
    merge(points_.back(), point);
  }
}

void Recording::write_to(Observation& observation) const {
  observation.samples = samples_;
  observation.baseline_bytes = baseline_;
  std::optional<double> average[kValues], peak[kValues];
  for (int i = 0; i < kValues; ++i) {
    const Figure& figure = figures_[i];
    if (figure.count == 0) continue;
    // All samples at one moment have no time to stand for.
    average[i] = figure.weight > 0
                     ? figure.weighted / figure.weight
                     : figure.sum / static_cast<double>(figure.count);
    peak[i] = figure.peak;
  }
  const auto values = [](const std::optional<double>(&from)[kValues]) {
    Observation::Values to{{}, from[kUtilisation], from[kPower], from[kClock]};
    if (from[kMemory]) to.memory_bytes = std::llround(*from[kMemory]);
    return to;
  };
  observation.average = values(average);
  observation.peak = values(peak);

  std::vector<Point> points = points_;
  while (points.size() > kPoints) merge_pairs(points);
  Observation::Series& series = observation.series;
  series = {};
  for (const Point& point : points) {
    series.t_s.push_back(point.t_sum / static_cast<double>(point.samples));
  }
  const auto list = [&points](int value) {
    std::vector<double> result;
    const auto seen = [value](const Point& p) { return p.count[value] > 0; };
    const auto first = std::find_if(points.begin(), points.end(), seen);
    if (first == points.end()) return result;
    const auto of = [value](const Point& p) {
      return value == kMemory
                 ? p.sum[value]
                 : p.sum[value] / static_cast<double>(p.count[value]);
    };
    double last = of(*first);
    for (const Point& point : points) {
      if (seen(point)) last = of(point);
      result.push_back(last);
    }
    return result;
  };
  for (const double bytes : list(kMemory)) {
    series.memory_bytes.push_back(std::llround(bytes));
  }
  series.utilisation = list(kUtilisation);
  series.power_w = list(kPower);
  series.clock_mhz = list(kClock);
}

}  // namespace reprise
