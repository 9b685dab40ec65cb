// Tested by tests/observe/observation_test.cpp.
#include <reprise/observe/observer.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace reprise {

Recording::Recording(std::optional<int64_t> baseline_bytes)
    : baseline_(baseline_bytes) {
  // add() must not allocate.
  points_.reserve(2 * kPoints);
  past_.reserve(2 * kPoints);
}

void Recording::merge(Point& into, const Point& other) {
  into.t_sum += other.t_sum;
  into.last_s = std::max(into.last_s, other.last_s);
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

void Recording::merge(Interval& into, const Interval& other) {
  into.from_s = std::min(into.from_s, other.from_s);
  into.to_s = std::max(into.to_s, other.to_s);
  into.weighted += other.weighted;
  into.weight += other.weight;
  into.count += other.count;
}

template <class Item>
void Recording::merge_pairs(std::vector<Item>& items) {
  const size_t pairs = (items.size() + 1) / 2;
  for (size_t i = 0; i < pairs; ++i) {
    Item item = items[2 * i];
    if (2 * i + 1 < items.size()) merge(item, items[2 * i + 1]);
    items[i] = item;
  }
  items.resize(pairs);
}

void Recording::add(double t_s, const DeviceSample& sample) {
  std::optional<double> values[kValues] = {std::nullopt, sample.utilisation,
                                           sample.power_w, sample.clock_mhz};
  if (sample.memory_bytes) {
    values[kMemory] = static_cast<double>(
        std::max<int64_t>(0, *sample.memory_bytes - baseline_.value_or(0)));
  }
  Point point;
  point.t_sum = point.last_s = t_s;
  point.samples = 1;
  for (int i = 0; i < kValues; ++i) {
    if (!values[i]) continue;
    const double value = *values[i];
    Aggregate& aggregate = aggregates_[i];
    const double weight = t_s - aggregate.since_s;
    aggregate.since_s = t_s;
    aggregate.weighted += weight * value;
    aggregate.weight += weight;
    aggregate.sum += value;
    aggregate.peak =
        aggregate.count == 0 ? value : std::max(aggregate.peak, value);
    ++aggregate.count;
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
  for (const PastUtilisation& past : sample.past) add(past);
}

void Recording::add(const PastUtilisation& past) {
  const double weight = std::max(0.0, past.to_s - past.from_s);
  Aggregate& aggregate = aggregates_[kUtilisation];
  aggregate.since_s = std::max(aggregate.since_s, past.to_s);
  aggregate.weighted += weight * past.percent;
  aggregate.weight += weight;
  aggregate.sum += past.percent;
  aggregate.peak = aggregate.count == 0
                       ? past.percent
                       : std::max(aggregate.peak, past.percent);
  ++aggregate.count;
  if (weight <= 0) return;
  const Interval interval{past.from_s, past.to_s, weight * past.percent, weight,
                          1};
  if (past_.empty() || past_.back().count == per_interval_) {
    if (past_.size() == 2 * kPoints) {
      merge_pairs(past_);
      per_interval_ *= 2;
    }
    past_.push_back(interval);
  } else {
    merge(past_.back(), interval);
  }
}

void Recording::add_past_to(std::vector<Point>& points) const {
  double since_s = 0;
  for (size_t i = 0; i < points.size(); ++i) {
    // The clocks may differ slightly: values after the end go to the last point.
    const double until_s = i + 1 < points.size()
                               ? points[i].last_s
                               : std::numeric_limits<double>::infinity();
    double weighted = 0, weight = 0;
    for (const Interval& interval : past_) {
      const double overlap_s =
          std::min(until_s, interval.to_s) - std::max(since_s, interval.from_s);
      if (overlap_s <= 0) continue;
      weighted += overlap_s * interval.weighted / interval.weight;
      weight += overlap_s;
    }
    if (weight > 0) {
      points[i].sum[kUtilisation] += weighted / weight;
      ++points[i].count[kUtilisation];
    }
    since_s = points[i].last_s;
  }
}

void Recording::write_to(Observation& observation) const {
  observation.samples = samples_;
  observation.baseline_bytes = baseline_;
  std::optional<double> average[kValues], peak[kValues];
  for (int i = 0; i < kValues; ++i) {
    const Aggregate& aggregate = aggregates_[i];
    if (aggregate.count == 0) continue;
    // Without elapsed time, all samples have the same weight.
    average[i] = aggregate.weight > 0
                     ? aggregate.weighted / aggregate.weight
                     : aggregate.sum / static_cast<double>(aggregate.count);
    peak[i] = aggregate.peak;
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
  add_past_to(points);
  Observation::Series& series = observation.series;
  series = {};
  for (const Point& point : points) {
    series.t_s.push_back(point.t_sum / static_cast<double>(point.samples));
  }
  const auto list = [&points](int value) {
    std::vector<double> result;
    const auto has_value = [value](const Point& p) {
      return p.count[value] > 0;
    };
    const auto first = std::find_if(points.begin(), points.end(), has_value);
    if (first == points.end()) return result;
    const auto value_of = [value](const Point& p) {
      return value == kMemory
                 ? p.sum[value]
                 : p.sum[value] / static_cast<double>(p.count[value]);
    };
    double last = value_of(*first);
    for (const Point& point : points) {
      if (has_value(point)) last = value_of(point);
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
