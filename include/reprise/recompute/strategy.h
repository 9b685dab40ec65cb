#pragma once

#include <reprise/recompute/schedule.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace reprise {

enum class StrategyKind { kNone, kAll, kEvery, kCheckpoints, kSqrt, kRevolve };

/// A way to make schedules, as written on the command line:
///
///     none           keeps everything; nothing runs again
///     all            keeps every stage's input; every stage but the last again
///     every:K        keeps the input of every K-th stage; once again
///     checkpoints:K  keeps K stage outputs, evenly spread; once again
///     sqrt           keeps about √n stage inputs, evenly spread; once again
///     revolve:S      keeps at most S stage inputs at a time, the chain's own
///                    included; runs again as seldom as S slots allow
///
/// All but checkpoints:K leave the last segment's graph in place, since its
/// backward comes next. checkpoints:K drops that segment too, so that after the
/// forward pass nothing but the K outputs is held.
///
/// sqrt: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory
/// Cost", 2016. revolve: Griewank, Walther, "Algorithm 799: Revolve", ACM TOMS
/// 26(1), 2000.
struct Strategy {
  StrategyKind kind = StrategyKind::kNone;
  int value = 0;  ///< K or S

  /// Throws c10::Error on an unknown name or a missing or malformed number.
  static Strategy parse(std::string_view text);
  std::string to_text() const;
  bool operator==(const Strategy&) const = default;
};

/// none, all, every:K and so on, as above.
const std::vector<std::string>& strategy_names();

/// Throws c10::Error where the number does not fit the number of stages.
///
/// `output_bytes`, of each stage (see output_bytes() in trace.h): where given,
/// checkpoints:K keeps, in the neighbourhood of each evenly spread place, the
/// smallest output.
Schedule make_schedule(const Strategy& strategy, int stages,
                       const std::vector<int64_t>& output_bytes = {});

/// `make_schedule(Strategy::parse(text), stages)`; or a schedule itself, as
/// Schedule::to_text() writes it, which is then named "given".
Schedule make_schedule(std::string_view text, int stages);

/// True where `text` is meant as a schedule itself: "K0 K1 B1 …".
bool is_schedule_text(std::string_view text);

/// A schedule that cuts the chain into segments, keeps their inputs and runs
/// each segment again as a whole before its backward. `starts` are the first
/// stages of the segments, from 0, rising. With `keep_last` the last segment's
/// graph stays from the forward pass.
Schedule make_segments(std::string name, int stages,
                       const std::vector<int>& starts, bool keep_last = true);

}  // namespace reprise
