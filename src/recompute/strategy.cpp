#include "base/text_check.h"

#include <reprise/recompute/strategy.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <limits>

namespace reprise {
namespace {

using Sizes = std::vector<int64_t>;

/// Returns the first stages of `segments` segments whose lengths differ by at
/// most one.
std::vector<int> even_starts(int stages, int segments) {
  std::vector<int> starts;
  for (int64_t s = 0; s < segments; ++s) {
    starts.push_back(static_cast<int>(s * stages / segments));
  }
  return starts;
}

/// As even_starts(), but moves each start to the stage with the smallest input
/// among those nearer to it than to the other starts.
std::vector<int> cheap_starts(int stages, int segments,
                              const Sizes& output_bytes) {
  std::vector<int> starts{0};
  const double length = static_cast<double>(stages) / segments;
  for (int s = 1; s < segments; ++s) {
    const double place = s * length;
    const auto bytes = [&](int start) {
      return output_bytes.at(static_cast<size_t>(start) - 1);
    };
    const auto distance = [&](int start) { return std::abs(start - place); };
    int best = 0;
    for (int start = starts.back() + 1; start < stages; ++start) {
      if (best > 0 && start > place + length / 2) break;
      // Leave one stage for each of the remaining segments.
      if (best > 0 && stages - start < segments - s) break;
      if (best > 0 && start < place - length / 2) continue;
      const bool inside = best > 0 && distance(best) <= length / 2;
      const bool better =
          best == 0 || !inside || bytes(start) < bytes(best) ||
          (bytes(start) == bytes(best) && distance(start) < distance(best));
      if (better) best = start;
    }
    starts.push_back(best);
  }
  return starts;
}

/// The binomial schedule, computed by the recursion that defines it:
///
///   runs(l, s) = min over j of  j + runs(l - j, s - 1) + runs(j, s)
///
/// l stages whose input occupies one of s slots are reversed by running j
/// stages forward, keeping the input of stage j + 1 in a second slot, reversing
/// the last l - j stages with s - 1 slots, and then reversing the first j
/// stages with s slots. The table also yields the best j; the closed form gives
/// only the number of runs.
class Revolve {
 public:
  Revolve(int stages, int slots)
      : stages_(stages), slots_(std::min(slots, stages)) {
    const auto rows = static_cast<size_t>(slots_) + 1;
    table_.assign(rows, std::vector<Cell>(static_cast<size_t>(stages_) + 1));
    for (int l = 1; l <= stages_; ++l) at(l, 1) = {int64_t{l} * (l + 1) / 2, 0};
    for (int s = 2; s <= slots_; ++s) fill_row(s);
  }

  std::vector<Op> ops() {
    reverse(0, stages_, slots_);
    return ops_;
  }

 private:
  struct Cell {
    int64_t runs = 0;
    int split = 0;
  };

  Cell& at(int length, int slots) {
    return table_[static_cast<size_t>(slots)][static_cast<size_t>(length)];
  }
  const Cell& cell(int length, int slots) const {
    return table_[static_cast<size_t>(slots)][static_cast<size_t>(length)];
  }

  void fill_row(int s) {
    at(1, s) = {1, 0};
    int from = 1;
    for (int l = 2; l <= stages_; ++l) {
      Cell best{std::numeric_limits<int64_t>::max(), 0};
      // The cost is convex in the split, and the best split is monotonic in l.
      for (int j = from; j < l; ++j) {
        const int64_t runs = j + cell(l - j, s - 1).runs + cell(j, s).runs;
        if (runs < best.runs) {
          best = {runs, j};
        } else if (runs > best.runs) {
          break;
        }
      }
      at(l, s) = best;
      from = best.split;
    }
  }

  /// Runs stages first … first + count - 1 and keeps the input of the first
  /// one.
  void advance(int first, int count) {
    for (int i = 0; i < count; ++i) {
      ops_.push_back({i == 0 ? OpKind::kForwardKeepInput : OpKind::kForwardDrop,
                      first + i});
    }
  }

  void reverse_one(int stage) {
    ops_.push_back({OpKind::kForwardKeep, stage});
    // The caller owns the last stage's output in the forward pass.
    if (stage < stages_ - 1) ops_.push_back({OpKind::kDiscard, stage + 1});
    ops_.push_back({OpKind::kBackward, stage});
  }

  void reverse(int first, int length, int slots) {
    if (slots == 1 || length == 1) {
      for (int i = length - 1; i >= 0; --i) {
        advance(first, i);
        reverse_one(first + i);
      }
      return;
    }
    const int split = cell(length, slots).split;
    advance(first, split);
    reverse(first + split, length - split, slots - 1);
    reverse(first, split, slots);
  }

  int stages_;
  int slots_;
  std::vector<std::vector<Cell>> table_;
  std::vector<Op> ops_;
};

void check_range(const Strategy& strategy, int low, int high, int stages) {
  TORCH_CHECK(strategy.value >= low && strategy.value <= high,
              "[make_schedule] expected a number between ", low, " and ", high,
              " in '", strategy.to_text(), "' for a chain of ", stages,
              " stages, got ", strategy.value);
}

Schedule make_none(const Strategy& strategy, int stages, const Sizes&) {
  return make_segments(strategy.to_text(), stages, {0});
}

Schedule make_all(const Strategy& strategy, int stages, const Sizes&) {
  return make_segments(strategy.to_text(), stages, even_starts(stages, stages));
}

Schedule make_sqrt(const Strategy& strategy, int stages, const Sizes&) {
  const auto segments = static_cast<int>(std::lround(std::sqrt(stages)));
  return make_segments(strategy.to_text(), stages,
                       even_starts(stages, segments));
}

Schedule make_every(const Strategy& strategy, int stages, const Sizes&) {
  check_range(strategy, 1, stages, stages);
  std::vector<int> starts;
  for (int i = 0; i < stages; i += strategy.value) starts.push_back(i);
  return make_segments(strategy.to_text(), stages, starts);
}

Schedule make_checkpoints(const Strategy& strategy, int stages,
                          const Sizes& output_bytes) {
  check_range(strategy, 0, stages - 1, stages);
  const int segments = strategy.value + 1;
  return make_segments(strategy.to_text(), stages,
                       output_bytes.empty()
                           ? even_starts(stages, segments)
                           : cheap_starts(stages, segments, output_bytes),
                       false);
}

Schedule make_revolve(const Strategy& strategy, int stages, const Sizes&) {
  const std::string name = strategy.to_text();
  TORCH_CHECK(strategy.value >= 1,
              "[make_schedule] expected at least one slot in ", name,
              " (the chain's input takes the first), got ", strategy.value);
  return Schedule(name, stages, Revolve(stages, strategy.value).ops());
}

/// With one slot, the number of operations is quadratic in the number of stages.
bool revolve_is_short(int slots, int stages) {
  return slots > 1 || stages <= 200;
}

/// Everything about one kind of strategy.
struct KindInfo {
  StrategyKind kind;
  std::string_view name;
  Schedule (*make)(const Strategy& strategy, int stages,
                   const Sizes& output_bytes);
  std::string_view letter{};   // of its number in help texts; empty: no number
  int lowest = 0;              // number, of as many as there are stages
  std::vector<int> samples{};  // numbers for sample_strategies()
  bool (*is_short)(int number, int stages) = nullptr;  // null: always
};

/// The strategies, in the order of help texts. To add one, add its name to
/// StrategyKind and an entry here.
const std::vector<KindInfo>& kinds() {
  static const std::vector<KindInfo> list = {
      {StrategyKind::kNone, "none", make_none},
      {StrategyKind::kAll, "all", make_all},
      {StrategyKind::kSqrt, "sqrt", make_sqrt},
      {StrategyKind::kEvery, "every", make_every, "K", 1, {2, 3}},
      {StrategyKind::kCheckpoints,
       "checkpoints",
       make_checkpoints,
       "K",
       0,
       {0, 2}},
      {StrategyKind::kRevolve,
       "revolve",
       make_revolve,
       "S",
       1,
       {1, 2, 3},
       revolve_is_short},
  };
  return list;
}

const KindInfo& info_of(StrategyKind kind) {
  for (const KindInfo& info : kinds()) {
    if (info.kind == kind) return info;
  }
  TORCH_INTERNAL_ASSERT(false, "unknown strategy");
}

/// Returns 1 … most. If there are more than 64, returns all up to 32 and about
/// thirty larger ones at increasing distances.
std::vector<int> sampled_numbers(int most) {
  std::vector<int> numbers;
  for (int i = 1; i <= most; i += most <= 64 || i < 32 ? 1 : 1 + i / 8) {
    numbers.push_back(i);
  }
  return numbers;
}

}  // namespace

Strategy Strategy::parse(std::string_view text) {
  const auto colon = text.find(':');
  const std::string_view word = text.substr(0, colon);
  for (const KindInfo& info : kinds()) {
    if (info.name != word) continue;
    Strategy strategy{info.kind, 0};
    const bool numbered = !info.letter.empty();
    if (!numbered && colon == std::string_view::npos) return strategy;
    if (numbered && colon != std::string_view::npos) {
      const char* end = text.data() + text.size();
      const auto [rest, error] =
          std::from_chars(text.data() + colon + 1, end, strategy.value);
      if (error == std::errc{} && rest == end) return strategy;
    }
    TORCH_CHECK(false, "[Strategy::parse] expected ", std::string(info.name),
                numbered ? ":N with a whole number N" : " alone", ", got ",
                in_quotes(std::string(text)));
  }
  std::string known;
  for (const std::string& name : strategy_names()) {
    known += (known.empty() ? "" : ", ") + name;
  }
  TORCH_CHECK(false, "[Strategy::parse] expected one of ", known, ", got ",
              in_quotes(std::string(text)));
}

const std::vector<std::string>& strategy_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const KindInfo& info : kinds()) {
      list.emplace_back(info.name);
      if (!info.letter.empty()) list.back().append(":").append(info.letter);
    }
    return list;
  }();
  return names;
}

std::string Strategy::to_text() const {
  const KindInfo& info = info_of(kind);
  std::string text(info.name);
  if (!info.letter.empty()) text.append(":").append(std::to_string(value));
  return text;
}

std::vector<Strategy> strategies_for(int stages) {
  std::vector<Strategy> list;
  for (const KindInfo& info : kinds()) {
    if (info.letter.empty()) list.push_back({info.kind, 0});
  }
  for (const int k : sampled_numbers(stages)) {
    for (const KindInfo& info : kinds()) {
      const int number = info.lowest + k - 1;
      if (info.letter.empty()) continue;
      if (info.is_short && !info.is_short(number, stages)) continue;
      list.push_back({info.kind, number});
    }
  }
  return list;
}

std::vector<Strategy> sample_strategies() {
  std::vector<Strategy> list;
  for (const KindInfo& info : kinds()) {
    if (info.letter.empty()) list.push_back({info.kind, 0});
    for (const int number : info.samples) list.push_back({info.kind, number});
  }
  return list;
}

Schedule make_segments(std::string name, int stages,
                       const std::vector<int>& starts, bool keep_last) {
  TORCH_CHECK(!starts.empty() && starts.front() == 0,
              "[make_segments] expected the first segment to start at stage 0");
  std::vector<Op> ops;
  const auto segments = static_cast<int>(starts.size());
  const auto start_of = [&](int s) { return starts[static_cast<size_t>(s)]; };
  const auto end_of = [&](int s) {
    return s + 1 < segments ? start_of(s + 1) : stages;
  };
  const auto rebuild = [&](int s) {
    for (int i = start_of(s); i < end_of(s); ++i) {
      ops.push_back({OpKind::kForwardKeep, i});
    }
  };

  for (int s = 0; s < segments; ++s) {
    if (s + 1 == segments && keep_last) {
      rebuild(s);
      continue;
    }
    for (int i = start_of(s); i < end_of(s); ++i) {
      ops.push_back(
          {i == start_of(s) ? OpKind::kForwardKeepInput : OpKind::kForwardDrop,
           i});
    }
  }
  for (int s = segments - 1; s >= 0; --s) {
    if (s + 1 < segments || !keep_last) {
      rebuild(s);
      ops.push_back({OpKind::kDiscard, end_of(s)});
    }
    for (int i = end_of(s) - 1; i >= start_of(s); --i) {
      ops.push_back({OpKind::kBackward, i});
    }
  }
  return Schedule(std::move(name), stages, std::move(ops));
}

Schedule make_schedule(const Strategy& strategy, int stages,
                       const std::vector<int64_t>& output_bytes) {
  TORCH_CHECK(stages >= 1, "[make_schedule] expected at least one stage, got ",
              stages);
  TORCH_CHECK(output_bytes.empty() ||
                  output_bytes.size() == static_cast<size_t>(stages),
              "[make_schedule] expected the output bytes of ", stages,
              " stages, got ", output_bytes.size());
  return info_of(strategy.kind).make(strategy, stages, output_bytes);
}

bool is_schedule_text(std::string_view text) {
  return text.size() >= 2 &&
         std::string_view("KDI").find(text[0]) != std::string_view::npos &&
         text[1] >= '0' && text[1] <= '9';
}

Schedule make_schedule(std::string_view text, int stages) {
  if (is_schedule_text(text)) return Schedule::parse("given", stages, text);
  return make_schedule(Strategy::parse(text), stages);
}

}  // namespace reprise
