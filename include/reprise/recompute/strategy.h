#pragma once

#include <reprise/recompute/schedule.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace reprise {

enum class StrategyKind { kNone, kAll, kEvery, kCheckpoints, kSqrt, kRevolve };

/// A rule that generates schedules, written as on the command line:
///
///     none           keep all stages; recompute nothing
///     all            keep every stage input; recompute all but the last stage
///     every:K        keep every K-th stage input; recompute segments once
///     checkpoints:K  keep K evenly spread stage outputs; recompute once
///     sqrt           keep about √n evenly spread stage inputs; recompute once
///     revolve:S      keep at most S stage inputs at a time, including the
///                    chain's; recompute as rarely as S slots allow
///
/// All strategies but checkpoints:K keep the last segment, since its backward
/// comes first. checkpoints:K drops it too, so that only the K outputs are held
/// after the forward pass.
///
/// sqrt: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory
/// Cost", 2016. revolve: Griewank, Walther, "Algorithm 799: Revolve", ACM TOMS
/// 26(1), 2000.
struct Strategy {
  StrategyKind kind = StrategyKind::kNone;
  int value = 0;  ///< K or S; 0 for strategies without a number

  /// Throws c10::Error on an unknown name or a missing or malformed number.
  static Strategy parse(std::string_view text);
  /// Formats the strategy as parse() reads it.
  std::string to_text() const;
  bool operator==(const Strategy&) const = default;
};

/// Returns the strategies as shown in help texts: "none", "all", "every:K", …
const std::vector<std::string>& strategy_names();

/// Returns the strategies to choose from for a chain of `stages` stages: every kind with
/// every number that makes a difference. Chains of more than 64 stages have a selection of
/// the numbers.
std::vector<Strategy> strategies_for(int stages);

/// Returns one to three strategies of every kind, to test with. They are valid for chains
/// of three or more stages.
std::vector<Strategy> sample_strategies();

/// Creates the schedule of `strategy` for a chain of `stages` stages. Throws
/// c10::Error if the strategy's number is out of range for that many stages.
///
/// If `output_bytes` is given, the bytes of each stage's outputs (see
/// output_bytes() in stage_costs.h), checkpoints:K keeps the smallest output
/// near each evenly spread position.
Schedule make_schedule(const Strategy& strategy, int stages,
                       const std::vector<int64_t>& output_bytes = {});

/// Creates a schedule from the name of a strategy, or from the output of
/// Schedule::to_text(). The latter is named "given". Throws c10::Error if
/// `text` is neither.
Schedule make_schedule(std::string_view text, int stages);

/// Returns whether `text` looks like the output of Schedule::to_text(): "K0 K1
/// B1 …".
bool is_schedule_text(std::string_view text);

/// Creates a schedule that divides the chain into segments, keeps the input of
/// each one, and recomputes each segment as a whole before its backward.
/// `starts` lists the first stages of the segments in ascending order,
/// beginning with 0. If `keep_last` is true, the last segment is kept from the
/// forward pass. Throws c10::Error if `starts` is not valid.
Schedule make_segments(std::string name, int stages,
                       const std::vector<int>& starts, bool keep_last = true);

}  // namespace reprise
