#pragma once

#include <reprise/recompute/simulate.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace reprise::testing {

/// The exact Pareto front of memory and time over all persistent schedules of a
/// chain. A reference for the solver that shares no code with it: memory is
/// exact and not divided into slots, and all intervals are considered. Times
/// must be whole milliseconds, so that an interval has at most one point per
/// millisecond.
///
/// The outputs must be new tensors that share no memory with inputs. Launch
/// times are ignored.
class ExactSchedules {
 public:
  /// Omits schedules that need more than `max_bytes`.
  explicit ExactSchedules(
      const ChainCosts& chain_costs,
      int64_t max_bytes = std::numeric_limits<int64_t>::max())
      : chain_costs_(chain_costs),
        stages_(static_cast<int>(chain_costs.stages.size())),
        max_bytes_(max_bytes) {
    name_buffers();
    find_starts();
    for (int t = 1; t <= stages_; ++t) {
      for (int s = t - 1; s >= 0; --s) {
        for (auto& start : starts_[at(s)]) reverse(s, start, t);
      }
    }
  }

  /// Returns the minimum memory of all schedules.
  int64_t least_bytes() const { return whole().front().bytes; }

  /// Returns the minimum time within `bytes`, or nothing if no schedule fits.
  std::optional<double> time_ms(int64_t bytes) const {
    const int point = last_within(whole(), bytes);
    if (point < 0) return std::nullopt;
    return whole()[at(point)].ms;
  }

  struct Point {
    int64_t bytes;
    int ms;
  };
  /// Points by ascending memory and descending time.
  const std::vector<Point>& points() const { return whole(); }

 private:
  using Points = std::vector<Point>;
  using Ids = std::vector<int>;

  /// A boundary at which an interval starts, and which of its buffers are held
  /// outside of it.
  struct Start {
    Ids held;
    int64_t own_bytes = 0;
    std::vector<std::pair<int, int64_t>> kept;  // next start and saved bytes
    std::vector<int> dropped;      // start at each boundary kept next
    std::vector<Points> reversed;  // by the end of the interval
  };
  /// A way to reverse an interval: one or two smaller intervals, each with less
  /// memory.
  struct Way {
    int ms;
    int64_t least;  // minimum memory besides the intervals
    const Points* first = nullptr;
    int64_t first_less = 0;
    const Points* second = nullptr;
    int64_t second_less = 0;
  };

  static size_t at(int i) { return static_cast<size_t>(i); }
  const StageCosts& stage(int s) const { return chain_costs_.stages[at(s)]; }
  const Points& whole() const { return starts_[0][0].reversed.back(); }

  static int whole_ms(double ms) {
    TORCH_CHECK(ms == std::floor(ms) && ms >= 0 && ms < 1e6,
                "[ExactSchedules] expected whole milliseconds, got ", ms);
    return static_cast<int>(ms);
  }

  void name_buffers() {
    ids_.resize(at(stages_) + 1);
    for (size_t i = 0; i < chain_costs_.input_bytes.size(); ++i) {
      ids_[0].push_back(static_cast<int>(i));
      bytes_.push_back(0);  // held by the caller
    }
    for (int s = 0; s < stages_; ++s) {
      for (const auto& output : stage(s).outputs) {
        TORCH_CHECK(output.input < 0 || s + 1 < stages_,
                    "[ExactSchedules] expected an output of new tensors");
        if (output.input >= 0) {
          ids_[at(s) + 1].push_back(ids_[at(s)].at(at(output.input)));
          continue;
        }
        ids_[at(s) + 1].push_back(static_cast<int>(bytes_.size()));
        bytes_.push_back(output.bytes);
      }
    }
    for (const int id : ids_.back()) output_bytes_ += bytes_[at(id)];
  }

  static Ids sorted(Ids ids) {
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    return ids;
  }
  static Ids common(const Ids& a, const Ids& b) {
    Ids both;
    std::set_intersection(a.begin(), a.end(), b.begin(), b.end(),
                          std::back_inserter(both));
    return both;
  }
  int64_t bytes_besides(const Ids& ids, const Ids& held) const {
    int64_t bytes = 0;
    for (const int id : sorted(ids)) {
      if (!std::binary_search(held.begin(), held.end(), id)) {
        bytes += bytes_[at(id)];
      }
    }
    return bytes;
  }

  int start_at(int s, Ids held) {
    auto& list = starts_[at(s)];
    for (size_t i = 0; i < list.size(); ++i) {
      if (list[i].held == held) return static_cast<int>(i);
    }
    Start start;
    start.own_bytes = bytes_besides(ids_[at(s)], held);
    start.held = std::move(held);
    start.reversed.resize(at(stages_) + 1);
    list.push_back(std::move(start));
    return static_cast<int>(list.size()) - 1;
  }

  void find_starts() {
    starts_.resize(at(stages_));
    start_at(0, {});
    for (int s = 0; s < stages_; ++s) {
      for (size_t i = 0; i < starts_[at(s)].size(); ++i) {
        std::vector<std::pair<int, int64_t>> kept;
        const Ids held = starts_[at(s)][i].held;
        for (size_t v = 0; v <= stage(s).variants.size(); ++v) {
          const auto& run = stage(s).kept_run(static_cast<int>(v));
          Ids saved;
          for (const int k : run.saved_inputs) {
            saved.push_back(ids_[at(s)].at(at(k)));
          }
          for (const int k : run.saved_outputs) {
            saved.push_back(ids_[at(s) + 1].at(at(k)));
          }
          const int64_t bytes = run.saved_bytes + bytes_besides(saved, held);
          saved.insert(saved.end(), held.begin(), held.end());
          const int next =
              s + 1 == stages_
                  ? 0
                  : start_at(s + 1, common(sorted(ids_[at(s) + 1]),
                                           sorted(std::move(saved))));
          kept.emplace_back(next, bytes);
        }
        std::vector<int> dropped(at(stages_));
        for (int j = s + 1; j < stages_; ++j) {
          dropped[at(j)] =
              start_at(j, common(sorted(ids_[at(s)]), sorted(ids_[at(j)])));
        }
        starts_[at(s)][i].kept = std::move(kept);
        starts_[at(s)][i].dropped = std::move(dropped);
      }
    }
  }

  /// Returns the gradient bytes that are live while stages are recomputed for
  /// the backward of stage t - 1.
  int64_t gradient(int t) const {
    return t == stages_ ? 0 : stage(t).input_gradient_bytes;
  }

  int64_t fresh_bytes(int s) const {
    int64_t bytes = 0;
    for (const auto& output : stage(s).outputs) {
      if (output.input < 0) bytes += output.bytes;
    }
    return bytes;
  }

  Way keeping(int s, const Start& start, int variant, int t) const {
    const auto& run = stage(s).kept_run(variant);
    const auto [next, graph_bytes] = start.kept[at(variant)];
    const int64_t forward = start.own_bytes + fresh_bytes(s) + run.saved_bytes +
                            run.keep_extra_bytes + gradient(t);
    int64_t backward = graph_bytes + run.backward_extra_bytes;
    if (s + 1 < stages_) {
      backward += stage(s + 1).input_gradient_bytes;
      if (t == stages_) backward += output_bytes_;
    } else {
      backward += chain_costs_.output_gradient_bytes;
      Ids saved;
      for (const int k : run.saved_outputs) {
        saved.push_back(ids_.back().at(at(k)));
      }
      backward += bytes_besides(ids_.back(), sorted(std::move(saved)));
    }
    Way way{whole_ms(run.forward_ms) + whole_ms(run.backward_ms),
            std::max(forward, backward)};
    // Nothing reads the output of a stage whose backward follows.
    if (s + 1 == t && t < stages_) way.ms -= whole_ms(run.unused_output_ms);
    if (s + 1 < t) {
      way.first = &starts_[at(s) + 1][at(next)].reversed[at(t)];
      way.first_less = graph_bytes;
    }
    return way;
  }

  /// Returns all ways to reverse stages s … t-1, slowest first.
  std::vector<Way> ways(int s, const Start& start, int t) const {
    std::vector<Way> list;
    for (size_t v = 0; v <= stage(s).variants.size(); ++v) {
      list.push_back(keeping(s, start, static_cast<int>(v), t));
    }
    int64_t live = 0;  // bytes of boundary j without boundary s
    int64_t most = 0;
    int ms = 0;
    const Ids from = sorted(ids_[at(s)]);
    for (int j = s + 1; j < t; ++j) {
      most = std::max(
          most, live + fresh_bytes(j - 1) + stage(j - 1).drop_extra_bytes);
      live = bytes_besides(ids_[at(j)], from);
      ms += whole_ms(stage(j - 1).forward_ms);
      const Start& rest = starts_[at(j)][at(start.dropped[at(j)])];
      list.push_back({ms, start.own_bytes + most + gradient(t),
                      &rest.reversed[at(t)], start.own_bytes,
                      &start.reversed[at(j)],
                      t == stages_ ? output_bytes_ : 0});
    }
    return list;
  }

  static int last_within(const Points& points, int64_t bytes) {
    const auto behind = std::partition_point(
        points.begin(), points.end(),
        [&](const Point& point) { return point.bytes <= bytes; });
    return static_cast<int>(behind - points.begin()) - 1;
  }

  /// Returns the time of a way within `bytes`, or nothing if it does not fit.
  static std::optional<int> time_of(const Way& way, int64_t bytes) {
    if (bytes < way.least) return std::nullopt;
    int ms = way.ms;
    for (const auto& [part, less] : {std::pair(way.first, way.first_less),
                                     std::pair(way.second, way.second_less)}) {
      if (part == nullptr) continue;
      const int point = last_within(*part, bytes - less);
      if (point < 0) return std::nullopt;
      ms += (*part)[at(point)].ms;
    }
    return ms;
  }

  static int64_t least_of(const Way& way) {
    constexpr int64_t never = std::numeric_limits<int64_t>::max();
    int64_t least = way.least;
    for (const auto& [part, less] : {std::pair(way.first, way.first_less),
                                     std::pair(way.second, way.second_less)}) {
      if (part == nullptr) continue;
      if (part->empty()) return never;
      least = std::max(least, part->front().bytes + less);
    }
    return least;
  }

  void reverse(int s, Start& start, int t) {
    const std::vector<Way> list = ways(s, start, t);
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const Way& way : list) least = std::min(least, least_of(way));
    if (least > max_bytes_) return;
    int slowest = std::numeric_limits<int>::max();  // at the minimum memory
    for (const Way& way : list) {
      slowest = std::min(slowest, time_of(way, least).value_or(slowest));
    }
    constexpr int64_t never = std::numeric_limits<int64_t>::max();
    bytes_for_.assign(at(slowest) + 1, never);
    bytes_for_[at(slowest)] = least;
    for (const Way& way : list) add(way, slowest);
    int64_t so_far = never;
    Points& points = start.reversed[at(t)];
    for (int ms = 0; ms <= slowest; ++ms) {
      if (bytes_for_[at(ms)] >= so_far) continue;
      so_far = bytes_for_[at(ms)];
      points.push_back({so_far, ms});
    }
    std::reverse(points.begin(), points.end());
    points.shrink_to_fit();
  }

  /// Records all points of a way that are faster than `slowest`.
  void add(const Way& way, int slowest) {
    const int64_t least = least_of(way);
    if (least > max_bytes_) return;
    static const Points kNothing = {{0, 0}};
    const Points& first = way.first != nullptr ? *way.first : kNothing;
    const Points& second = way.second != nullptr ? *way.second : kNothing;
    int i = last_within(first, least - way.first_less);
    int j = last_within(second, least - way.second_less);
    const int first_end = static_cast<int>(first.size()) - 1;
    const int second_end = static_cast<int>(second.size()) - 1;
    constexpr int64_t never = std::numeric_limits<int64_t>::max();
    for (int64_t bytes = least; bytes <= max_bytes_;) {
      const int ms = way.ms + first[at(i)].ms + second[at(j)].ms;
      if (ms < slowest) {
        bytes_for_[at(ms)] = std::min(bytes_for_[at(ms)], bytes);
      }
      const int64_t next_first =
          i < first_end ? first[at(i) + 1].bytes + way.first_less : never;
      const int64_t next_second =
          j < second_end ? second[at(j) + 1].bytes + way.second_less : never;
      if (next_first == never && next_second == never) return;
      bytes = std::min(next_first, next_second);
      if (next_first == bytes) ++i;
      if (next_second == bytes) ++j;
    }
  }

  const ChainCosts& chain_costs_;
  const int stages_;
  const int64_t max_bytes_;
  std::vector<Ids> ids_;        // buffers, by boundary and position
  std::vector<int64_t> bytes_;  // by buffer
  int64_t output_bytes_ = 0;
  std::vector<std::vector<Start>> starts_;  // by boundary
  std::vector<int64_t> bytes_for_;          // by time, in reverse()
};

}  // namespace reprise::testing
