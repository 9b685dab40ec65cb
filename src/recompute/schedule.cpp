#include <reprise/recompute/schedule.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <numeric>
#include <utility>

namespace reprise {
namespace {

constexpr std::string_view kLetters = "KDIBXF";  // in the order of OpKind

/// Executes operations symbolically and reports the first that is not valid.
class Validator {
 public:
  explicit Validator(int stages)
      : stages_(stages),
        held_(static_cast<size_t>(stages) + 1),
        graph_(static_cast<size_t>(stages)),
        next_backward_(stages - 1) {
    held_[0] = true;
  }

  std::optional<std::string> step(const Op& op) {
    const int last = op.kind == OpKind::kDiscard ? stages_ : stages_ - 1;
    if (op.stage < 0 || op.stage > last) {
      return fmt::format("expected a stage between 0 and {}", last);
    }
    if (op.variant < 0) {
      return fmt::format("expected a non-negative variant, got {}", op.variant);
    }
    if (op.variant > 0 && op.kind != OpKind::kForwardKeep) {
      return "only forward-keep operations have variants";
    }
    if (is_forward(op.kind)) return forward(op);
    if (op.kind == OpKind::kBackward) return backward(op.stage);
    if (op.kind == OpKind::kFetch) return fetch(op.stage);
    return discard(op.stage);
  }

  std::optional<std::string> finish() const {
    if (next_backward_ >= 0) {
      return fmt::format("stage {} has no backward", next_backward_);
    }
    for (size_t i = 0; i < held_.size(); ++i) {
      if (held_[i]) return fmt::format("boundary {} is never released", i);
    }
    return std::nullopt;
  }

 private:
  std::optional<std::string> forward(const Op& op) {
    const auto i = static_cast<size_t>(op.stage);
    if (!held_[i]) return fmt::format("its input, boundary {}, is not held", i);
    if (held_[i + 1]) {
      return fmt::format("its output, boundary {}, is already held", i + 1);
    }
    if (op.stage > next_backward_) return "its backward has already run";
    if (reached_ < stages_) {
      if (op.stage != reached_) {
        return fmt::format("the forward pass must run stage {} next", reached_);
      }
      ++reached_;
    }
    if (op.kind == OpKind::kForwardKeep) {
      if (graph_[i]) return "its autograd graph is already kept";
      graph_[i] = true;
    }
    if (op.kind != OpKind::kForwardKeepInput) held_[i] = false;
    held_[i + 1] = true;
    // The caller owns the output of the forward pass.
    if (op.stage == stages_ - 1 && !output_given_) {
      output_given_ = true;
      held_[i + 1] = false;
    }
    return std::nullopt;
  }

  std::optional<std::string> backward(int stage) {
    const auto i = static_cast<size_t>(stage);
    if (reached_ < stages_) return "the forward pass is not complete";
    if (stage != next_backward_) {
      return fmt::format("the backward of stage {} must run first",
                         next_backward_);
    }
    if (!graph_[i]) return "its autograd graph is not kept";
    graph_[i] = false;
    --next_backward_;
    return std::nullopt;
  }

  std::optional<std::string> fetch(int stage) const {
    if (reached_ < stages_) return "the forward pass is not complete";
    if (!graph_[static_cast<size_t>(stage)])
      return "its autograd graph is not kept";
    return std::nullopt;
  }

  std::optional<std::string> discard(int boundary) {
    const auto i = static_cast<size_t>(boundary);
    if (!held_[i]) return "the boundary is not held";
    held_[i] = false;
    return std::nullopt;
  }

  int stages_;
  std::vector<bool> held_;
  std::vector<bool> graph_;
  int reached_ = 0;    // stages that the forward pass has run
  int next_backward_;  // stage whose backward must run next
  bool output_given_ = false;
};

}  // namespace

std::string to_string(const Op& op) {
  static constexpr const char* kWords[] = {
      "forward-keep", "forward-drop", "forward-keep-input",
      "backward",     "discard",      "fetch"};
  const auto text =
      fmt::format("{} {}", kWords[static_cast<size_t>(op.kind)], op.stage);
  return op.variant == 0 ? text : fmt::format("{}.{}", text, op.variant);
}

std::optional<std::string> Schedule::problem(int stages,
                                             const std::vector<Op>& ops) {
  if (stages < 1) {
    return fmt::format("expected at least one stage, got {}", stages);
  }
  Validator validator(stages);
  for (size_t i = 0; i < ops.size(); ++i) {
    if (auto what = validator.step(ops[i])) {
      return fmt::format("operation {} ({}): {}", i, reprise::to_string(ops[i]),
                         *what);
    }
  }
  return validator.finish();
}

Schedule::Schedule(std::string name, int stages, std::vector<Op> ops)
    : name_(std::move(name)), stages_(stages), ops_(std::move(ops)) {
  const auto what = problem(stages_, ops_);
  TORCH_CHECK(!what, "[Schedule '", name_, "'] ", what.value_or(""));
  runs_.resize(static_cast<size_t>(stages_));
  for (const Op& op : ops_) {
    if (is_forward(op.kind)) ++runs_[static_cast<size_t>(op.stage)];
  }
  const auto last =
      std::find_if(ops_.begin(), ops_.end(), [this](const Op& op) {
        return is_forward(op.kind) && op.stage == stages_ - 1;
      });
  forward_ops_ = static_cast<size_t>(last - ops_.begin()) + 1;
}

Schedule Schedule::parse(std::string name, int stages, std::string_view text) {
  std::vector<Op> ops;
  size_t at = 0;
  while (at < text.size()) {
    if (text[at] == ' ' || text[at] == '\n') {
      ++at;
      continue;
    }
    const auto letter = kLetters.find(text[at]);
    int stage = 0, variant = 0;
    const char* end = text.data() + text.size();
    auto read = std::from_chars(text.data() + at + 1, end, stage);
    if (read.ec == std::errc{} && read.ptr != end && *read.ptr == '.') {
      read = std::from_chars(read.ptr + 1, end, variant);
    }
    TORCH_CHECK(
        letter != std::string_view::npos && read.ec == std::errc{},
        "[Schedule::parse] expected an operation such as K3 or K3.1 at '",
        std::string(text.substr(at, 8)), "'");
    ops.push_back({static_cast<OpKind>(letter), stage, variant});
    at = static_cast<size_t>(read.ptr - text.data());
  }
  return Schedule(std::move(name), stages, std::move(ops));
}

bool Schedule::leaves_outputs_unused(size_t index) const {
  const int stage = ops_.at(index).stage;
  if (index < forward_ops_ || ops_[index].kind != OpKind::kForwardKeep ||
      stage + 1 == stages_) {
    return false;
  }
  for (size_t next = index + 1; next < ops_.size(); ++next) {
    const Op& op = ops_[next];
    if (op.kind == OpKind::kBackward) return op.stage == stage;
    if (op.kind != OpKind::kFetch && op.kind != OpKind::kDiscard) return false;
  }
  return false;
}

int Schedule::total_runs() const {
  return std::accumulate(runs_.begin(), runs_.end(), 0);
}

std::string Schedule::to_text() const {
  std::string text;
  for (const Op& op : ops_) {
    if (!text.empty()) text += ' ';
    text += kLetters[static_cast<size_t>(op.kind)];
    text += std::to_string(op.stage);
    if (op.variant > 0) text += '.' + std::to_string(op.variant);
  }
  return text;
}

std::string Schedule::to_string() const {
  std::string text = fmt::format(
      "{}: {} stages, {} operations, {} stage runs ({} recomputed)\n", name_,
      stages_, ops_.size(), total_runs(), total_runs() - stages_);
  std::vector<std::string> first(static_cast<size_t>(stages_));
  for (size_t i = 0; i < forward_ops_; ++i) {
    const Op& op = ops_[i];
    if (!is_forward(op.kind)) continue;
    first[static_cast<size_t>(op.stage)] =
        op.variant > 0 ? fmt::format("variant {}", op.variant)
        : op.kind == OpKind::kForwardKeep      ? "kept"
        : op.kind == OpKind::kForwardKeepInput ? "input kept"
                                               : "dropped";
  }
  for (int i = 0; i < stages_; ++i) {
    text += fmt::format("  {:>4}  {:<12} runs {}\n", i,
                        first[static_cast<size_t>(i)], runs(i));
  }
  return text;
}

}  // namespace reprise
