#include <reprise/recompute/strategy.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <limits>

namespace reprise {
namespace {

struct Name {
  std::string_view text;
  StrategyKind kind;
  bool has_value;
};

constexpr std::array kNames = {
    Name{"none", StrategyKind::kNone, false},
    Name{"all", StrategyKind::kAll, false},
    Name{"sqrt", StrategyKind::kSqrt, false},
    Name{"every", StrategyKind::kEvery, true},
    Name{"checkpoints", StrategyKind::kCheckpoints, true},
    Name{"revolve", StrategyKind::kRevolve, true},
};

const Name& name_of(StrategyKind kind) {
  return *std::find_if(kNames.begin(), kNames.end(),
                       [kind](const Name& name) { return name.kind == kind; });
}

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
                              const std::vector<int64_t>& output_bytes) {
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

}  // namespace

Strategy Strategy::parse(std::string_view text) {
  const auto colon = text.find(':');
  const std::string_view word = text.substr(0, colon);
  for (const Name& name : kNames) {
    if (name.text != word) continue;
    Strategy strategy{name.kind, 0};
    if (!name.has_value && colon == std::string_view::npos) return strategy;
    if (name.has_value && colon != std::string_view::npos) {
      const char* end = text.data() + text.size();
      const auto [rest, error] =
          std::from_chars(text.data() + colon + 1, end, strategy.value);
      if (error == std::errc{} && rest == end) return strategy;
    }
    TORCH_CHECK(false, "[Strategy::parse] expected ", std::string(name.text),
                name.has_value ? ":N with a whole number N" : " alone",
                ", got '", std::string(text), "'");
  }
  std::string known;
  for (const std::string& name : strategy_names()) {
    known += (known.empty() ? "" : ", ") + name;
  }
  TORCH_CHECK(false, "[Strategy::parse] expected one of ", known, ", got '",
              std::string(text), "'");
}

const std::vector<std::string>& strategy_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const Name& name : kNames) {
      list.emplace_back(name.text);
      if (!name.has_value) continue;
      list.back() += name.kind == StrategyKind::kRevolve ? ":S" : ":K";
    }
    return list;
  }();
  return names;
}

std::string Strategy::to_text() const {
  const Name& name = name_of(kind);
  std::string text(name.text);
  if (name.has_value) text.append(1, ':').append(std::to_string(value));
  return text;
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
  const std::string name = strategy.to_text();
  switch (strategy.kind) {
    case StrategyKind::kNone:
      return make_segments(name, stages, {0});
    case StrategyKind::kAll:
      return make_segments(name, stages, even_starts(stages, stages));
    case StrategyKind::kEvery: {
      check_range(strategy, 1, stages, stages);
      std::vector<int> starts;
      for (int i = 0; i < stages; i += strategy.value) starts.push_back(i);
      return make_segments(name, stages, starts);
    }
    case StrategyKind::kCheckpoints:
      check_range(strategy, 0, stages - 1, stages);
      return make_segments(
          name, stages,
          output_bytes.empty()
              ? even_starts(stages, strategy.value + 1)
              : cheap_starts(stages, strategy.value + 1, output_bytes),
          false);
    case StrategyKind::kSqrt: {
      const auto segments = static_cast<int>(std::lround(std::sqrt(stages)));
      return make_segments(name, stages, even_starts(stages, segments));
    }
    case StrategyKind::kRevolve:
      TORCH_CHECK(strategy.value >= 1,
                  "[make_schedule] expected at least one slot in ", name,
                  " (the chain's input takes the first), got ", strategy.value);
      return Schedule(name, stages, Revolve(stages, strategy.value).ops());
  }
  TORCH_INTERNAL_ASSERT(false, "unknown strategy");
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
