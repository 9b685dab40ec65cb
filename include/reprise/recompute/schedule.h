#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace reprise {

/// What one operation of a schedule does. Stage i maps boundary i (its input)
/// to boundary i+1; boundary 0 is the chain's input, boundary n its output. A
/// boundary is *held* from when it is made or given until it is released.
enum class OpKind {
  kForwardKeep,       ///< run i, keep its graph; boundary i is released
  kForwardDrop,       ///< run i without a graph; boundary i is released
  kForwardKeepInput,  ///< run i without a graph; boundary i stays held
  kBackward,          ///< backward of i, which consumes its graph
  kDiscard,           ///< release boundary i
  /// begin to bring back what the graph of i has in the host's memory, ahead of its
  /// backward (host_memory.h); does nothing where it has nothing there
  kFetch,
};

/// Whether it runs a stage.
constexpr bool is_forward(OpKind kind) {
  return kind == OpKind::kForwardKeep || kind == OpKind::kForwardDrop ||
         kind == OpKind::kForwardKeepInput;
}

struct Op {
  OpKind kind;
  int stage;  ///< i; for kDiscard the boundary
  /// For kForwardKeep, which of the stage's variants runs, counted from 1; 0:
  /// the stage itself. The backward is that of the run that was kept.
  int variant = 0;
  bool operator==(const Op&) const = default;
};

/// "forward-keep 3", "forward-keep 3.1" for its first variant, "discard 4".
std::string to_string(const Op& op);

/// Which stage outputs are kept and which are recomputed, as an immutable list
/// of operations for one forward and one backward pass. Every schedule that
/// exists is valid; copies are cheap values and may be shared by threads.
///
/// Valid means: the first pass runs every stage once, in order; every run has
/// its input held and every backward its graph; backwards run once each, from
/// the last stage to the first; no graph is made twice or left over; no boundary is
/// held at the end; and what is fetched, in the backward pass, has its graph.
class Schedule {
 public:
  /// Throws c10::Error with what `problem()` says.
  Schedule(std::string name, int stages, std::vector<Op> ops);

  /// What makes `ops` no schedule for `stages` stages; nothing if they are one.
  static std::optional<std::string> problem(int stages,
                                            const std::vector<Op>& ops);

  /// Reads `to_text()`.
  static Schedule parse(std::string name, int stages, std::string_view text);

  const std::string& name() const { return name_; }
  int stages() const { return stages_; }
  const std::vector<Op>& ops() const { return ops_; }

  /// How many operations the forward pass has: those up to the first run of
  /// the last stage. All others belong to the backward pass.
  size_t forward_ops() const { return forward_ops_; }

  /// How often stage i runs forward; more than once means recomputed.
  int runs(int stage) const { return runs_.at(static_cast<size_t>(stage)); }
  int total_runs() const;

  /// One word an operation: K3 keep, K3.1 keep its first variant, D3 drop, I3
  /// keep-input, B3 backward, X3 discard, F3 fetch.
  std::string to_text() const;

  /// For people: a line with the totals, a row a stage with how it is kept.
  std::string to_string() const;

 private:
  std::string name_;
  int stages_;
  std::vector<Op> ops_;
  std::vector<int> runs_;
  size_t forward_ops_ = 0;
};

}  // namespace reprise
