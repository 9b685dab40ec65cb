#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace reprise {

/// Kinds of operations in a schedule. Stage i maps boundary i, its input, to
/// boundary i+1. Boundary 0 is the chain's input and boundary n its output. A
/// boundary is *held* from when it is computed until it is released.
enum class OpKind {
  kForwardKeep,  ///< run stage i, keep its autograd graph, release boundary i
  kForwardDrop,  ///< run stage i, drop its autograd graph, release boundary i
  kForwardKeepInput,  ///< run stage i, drop its autograd graph, hold boundary i
  kBackward,          ///< run the backward of stage i, which frees its graph
  kDiscard,           ///< release boundary i
  /// Start copying the activations that stage i saved in host memory back to
  /// the device (host_memory.h). Does nothing if there are none.
  kFetch,
};

/// Returns whether operations of this kind run a stage forward.
constexpr bool is_forward(OpKind kind) {
  return kind == OpKind::kForwardKeep || kind == OpKind::kForwardDrop ||
         kind == OpKind::kForwardKeepInput;
}

struct Op {
  OpKind kind;
  int stage;  ///< stage i, or boundary i for kDiscard
  /// For kForwardKeep, the variant of the stage to run, counted from 1; 0 is
  /// the stage itself. The backward is that of the kept run.
  int variant = 0;
  bool operator==(const Op&) const = default;
};

/// Formats an operation: "forward-keep 3", "forward-keep 3.1" (variant 1),
/// "discard 4".
std::string to_string(const Op& op);

/// An immutable list of operations for one forward and one backward pass of a
/// chain. It determines which stages are kept and which are recomputed. Every
/// Schedule object is valid, and may be shared by threads.
///
/// A schedule is valid if the forward pass runs every stage once, in order; the
/// input of every run is held; every backward has its autograd graph; backwards
/// run once each, from the last stage to the first; no graph is created twice
/// or left over; no boundary is held at the end; and kFetch occurs in the
/// backward pass for kept graphs only.
class Schedule {
 public:
  /// Throws c10::Error with the text of problem() if `ops` is not valid.
  Schedule(std::string name, int stages, std::vector<Op> ops);

  /// Returns why `ops` is not a valid schedule for `stages` stages, or nothing
  /// if it is.
  static std::optional<std::string> problem(int stages,
                                            const std::vector<Op>& ops);

  /// Parses the output of to_text(). Throws c10::Error if `text` is malformed
  /// or not a valid schedule.
  static Schedule parse(std::string name, int stages, std::string_view text);

  const std::string& name() const { return name_; }
  int stages() const { return stages_; }
  const std::vector<Op>& ops() const { return ops_; }

  /// Number of operations in the forward pass, which ends with the first run of
  /// the last stage. All others belong to the backward pass.
  size_t forward_ops() const { return forward_ops_; }

  /// Whether operation `index` runs a stage again right before its backward, so that nothing
  /// reads its outputs. False for the last stage, whose outputs are those of the chain.
  bool leaves_outputs_unused(size_t index) const;

  /// Number of forward runs of `stage`. A stage is recomputed if it runs more
  /// than once.
  int runs(int stage) const { return runs_.at(static_cast<size_t>(stage)); }
  /// Number of forward runs of all stages.
  int total_runs() const;

  /// Formats the schedule with one token per operation: K3 forward-keep, K3.1
  /// forward-keep of variant 1, D3 forward-drop, I3 forward-keep-input, B3
  /// backward, X3 discard, F3 fetch.
  std::string to_text() const;

  /// Formats the schedule for display: a line with totals, then one line per
  /// stage.
  std::string to_string() const;

  bool operator==(const Schedule&) const = default;

 private:
  std::string name_;
  int stages_;
  std::vector<Op> ops_;
  std::vector<int> runs_;
  size_t forward_ops_ = 0;
};

}  // namespace reprise
