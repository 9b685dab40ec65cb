#include "recompute/no_save_scope.h"
#include "recompute/recompute_context.h"
#include "recompute/stage_checks.h"
#include "recompute/stage_graph.h"
#include "recompute/tied_gradients.h"

#include <reprise/recompute/execution.h>
#include <reprise/recompute/host_memory.h>

#include <fmt/format.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <utility>

namespace reprise {
namespace {

/// A boundary that the execution holds.
struct Boundary {
  Tensors tensors;
  std::vector<bool> requires_grad;
  std::vector<int64_t> versions;
  // Keeps them counted by the meter.
  std::vector<std::shared_ptr<void>> counted;

  Boundary(Tensors list, std::vector<bool> needs_grad)
      : tensors(std::move(list)), requires_grad(std::move(needs_grad)) {
    for (const auto& tensor : tensors) {
      versions.push_back(detail::version_of(tensor));
    }
  }

  std::optional<size_t> first_changed() const {
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (detail::version_of(tensors[i]) != versions[i]) return i;
    }
    return std::nullopt;
  }
};

/// Properties that a recomputed output must share with the first one.
struct TensorShape {
  std::vector<int64_t> sizes;
  std::optional<torch::TensorOptions> options;  // empty if undefined

  explicit TensorShape(const torch::Tensor& tensor) {
    if (!tensor.defined()) return;
    sizes = tensor.sizes().vec();
    options = tensor.options().requires_grad(false);
  }

  bool operator==(const TensorShape& other) const {
    if (options.has_value() != other.options.has_value()) return false;
    return !options || (sizes == other.sizes &&
                        options->dtype() == other.options->dtype() &&
                        options->device() == other.options->device());
  }
};

std::string describe(const std::vector<TensorShape>& shapes) {
  std::ostringstream text;
  for (const auto& shape : shapes) {
    if (text.tellp() > 0) text << "; ";
    if (!shape.options) {
      text << "undefined";
      continue;
    }
    text << shape.options->dtype() << ' ' << c10::IntArrayRef(shape.sizes)
         << " on " << shape.options->device();
  }
  return text.str();
}

std::vector<bool> which_require_grad(const Tensors& tensors) {
  std::vector<bool> which;
  for (const auto& tensor : tensors) {
    which.push_back(tensor.defined() && tensor.requires_grad());
  }
  return which;
}

/// Returns, for each stage, whether it shares the autograd graph of the stage
/// before it: both are kept, their runs are consecutive, and so are their
/// backwards.
std::vector<bool> find_shared_graphs(const Schedule& schedule) {
  const auto n = static_cast<size_t>(schedule.stages());
  const auto& ops = schedule.ops();
  std::vector<size_t> kept_at(n);
  std::vector<size_t> back_at(n);
  for (size_t at = 0; at < ops.size(); ++at) {
    const auto i = static_cast<size_t>(ops[at].stage);
    if (ops[at].kind == OpKind::kForwardKeep) kept_at[i] = at;
    if (ops[at].kind == OpKind::kBackward) back_at[i] = at;
  }
  std::vector<bool> shares_graph(n, false);
  for (size_t i = 1; i < n; ++i) {
    shares_graph[i] =
        kept_at[i] == kept_at[i - 1] + 1 && back_at[i - 1] == back_at[i] + 1;
  }
  return shares_graph;
}

Tensors detach_all(const Tensors& tensors) {
  Tensors detached;
  for (const auto& tensor : tensors) {
    detached.push_back(tensor.defined() ? tensor.detach() : tensor);
  }
  return detached;
}

}  // namespace

class Execution::Impl {
 public:
  Impl(Chain chain, Schedule schedule, ExecutionOptions options)
      : chain_(std::move(chain)),
        schedule_(std::move(schedule)),
        options_(std::move(options)) {
    TORCH_CHECK(chain_.size() == schedule_.stages(),
                "[Execution] expected a schedule for ", chain_.size(),
                " stages, got '", schedule_.name(), "' for ",
                schedule_.stages());
    check_variants();
    if (options_.separate_graphs) {
      shares_graph_.assign(static_cast<size_t>(chain_.size()), false);
    } else {
      shares_graph_ = find_shared_graphs(schedule_);
    }
    for (const int stage : options_.cuts) {
      shares_graph_.at(static_cast<size_t>(stage)) = false;
    }
    const auto graphs =
        std::count(shares_graph_.begin(), shares_graph_.end(), false);
    if (graphs > 1) tied_ = tied_parameters(chain_);
  }

  Tensors forward(const Tensors& inputs) {
    release();
    if (!torch::GradMode::is_enabled()) return run_without_grad(inputs);
    try {
      const auto n = static_cast<size_t>(chain_.size());
      boundaries_.resize(n + 1);
      graphs_.resize(n);
      contexts_.resize(n);
      host_runs_.assign(n, {});
      output_shapes_.assign(n, {});
      runs_left_.clear();
      for (int i = 0; i < chain_.size(); ++i) {
        runs_left_.push_back(schedule_.runs(i));
      }
      hold(0, Boundary(detach_all(inputs), which_require_grad(inputs)));
      for (cursor_ = 0; cursor_ < schedule_.forward_ops(); ++cursor_) {
        run_op(schedule_.ops()[cursor_]);
      }
      Boundary outputs = std::move(*boundaries_.back());
      boundaries_.back().reset();
      outputs_require_grad_ = outputs.requires_grad;
      output_defined_.clear();
      for (const auto& output : outputs.tensors) {
        output_defined_.push_back(output.defined());
      }
      pending_ = true;
      if (std::find(outputs_require_grad_.begin(), outputs_require_grad_.end(),
                    true) == outputs_require_grad_.end()) {
        release();  // no output requires a gradient
      }
      return std::move(outputs.tensors);
    } catch (...) {
      release();
      throw;
    }
  }

  Tensors backward(Tensors gradients, bool accumulate) {
    TORCH_CHECK(pending_,
                "[Execution] backward needs a forward before it, with grad "
                "mode on and an output that requires a gradient; each forward "
                "allows one backward");
    TORCH_CHECK(gradients.size() == outputs_require_grad_.size(),
                "[Execution] expected a gradient for each of ",
                outputs_require_grad_.size(), " outputs, got ",
                gradients.size());
    for (size_t i = 0; i < gradients.size(); ++i) {
      TORCH_CHECK(!gradients[i].defined() || output_defined_[i],
                  "[Execution] expected no gradient for output ", i,
                  " of the chain, since ",
                  detail::stage_text(chain_, chain_.size() - 1),
                  " returned it undefined, got one");
    }
    gradients_ = std::move(gradients);
    accumulate_ = accumulate;
    try {
      {
        TiedGradients tied(accumulate ? tied_ : std::vector<TiedParameter>{});
        for (; cursor_ < schedule_.ops().size(); ++cursor_) {
          const Op& op = schedule_.ops()[cursor_];
          const bool runs_graph = op.kind == OpKind::kBackward &&
                                  graphs_[static_cast<size_t>(op.stage)];
          run_op(op);
          const int first = runs_graph ? first_of_graph(op.stage) : 0;
          if (first > 0) report_final(first, &tied);
        }
      }
      report_final(0, nullptr);
      Tensors result = std::move(gradients_);
      release();
      return result;
    } catch (...) {
      release();
      throw;
    }
  }

  bool pending() const { return pending_; }
  const std::vector<bool>& outputs_require_grad() const {
    return outputs_require_grad_;
  }

 private:
  void check_variants() const {
    for (const Op& op : schedule_.ops()) {
      if (op.variant == 0) continue;
      const Stage& stage = chain_[op.stage];
      TORCH_CHECK(static_cast<size_t>(op.variant) <= stage.variants().size(),
                  "[Execution] expected a variant up to ",
                  stage.variants().size(), " of stage ", op.stage, " '",
                  stage.name(), "', got ", op.variant, " in schedule '",
                  schedule_.name(), "'; see Stage::with_variant");
    }
  }

  Tensors run_without_grad(const Tensors& inputs) {
    Tensors current = inputs;
    for (int i = 0; i < chain_.size(); ++i) {
      detail::check_input_count("Execution", chain_, i, current.size());
      current = chain_[i](current);
      detail::check_outputs("Execution", chain_, i, current);
    }
    outputs_require_grad_.assign(current.size(), false);
    return current;
  }

  void run_op(const Op& op) {
    if (options_.memory != nullptr) options_.memory->before(op);
    if (options_.observer != nullptr) options_.observer->before(op);
    const auto i = static_cast<size_t>(op.stage);
    switch (op.kind) {
      case OpKind::kForwardKeep:
      case OpKind::kForwardDrop:
      case OpKind::kForwardKeepInput:
        with_error_context(op, op.stage, [&] { run_stage(op); });
        break;
      case OpKind::kBackward:
        if (!graphs_[i]) break;  // done by the backward of a later stage
        with_error_context(op, first_of_graph(op.stage), [&] {
          StageGraph graph = std::move(*graphs_[i]);
          graphs_[i].reset();
          gradients_ = graph.backward(std::move(gradients_), accumulate_);
        });
        break;
      case OpKind::kDiscard:
        boundaries_[i].reset();
        break;
      case OpKind::kFetch:
        with_error_context(op, op.stage, [&] { fetch(host_runs_[i]); });
        break;
    }
    if (options_.observer != nullptr) options_.observer->after(op);
    if (options_.memory != nullptr) options_.memory->after(op);
  }

  void report_final(int stage, TiedGradients* tied) {
    if (!accumulate_ || !options_.final_from) return;
    if (tied != nullptr) tied->finish(stage);
    options_.final_from(stage);
  }

  int first_of_graph(int stage) const {
    while (shares_graph_[static_cast<size_t>(stage)]) --stage;
    return stage;
  }

  bool next_shares_graph(int stage) const {
    const auto next = static_cast<size_t>(stage) + 1;
    return next < shares_graph_.size() && shares_graph_[next];
  }

  /// Adds the names of the stages to c10::Error exceptions. Others propagate
  /// unchanged.
  template <class F>
  void with_error_context(const Op& op, int first, F&& body) {
    try {
      body();
    } catch (c10::Error& error) {
      const auto name = [&](int i) {
        return fmt::format("{} '{}'", i, chain_[i].name());
      };
      error.add_context(fmt::format(
          "in stage {}{} ({})", name(first),
          first == op.stage ? std::string() : " to " + name(op.stage),
          to_string(op)));
      throw;
    }
  }

  void run_stage(const Op& op) {
    const auto i = static_cast<size_t>(op.stage);
    const bool recomputing = runs_left_[i] < schedule_.runs(op.stage);
    const bool keep = op.kind == OpKind::kForwardKeep;
    const Stage& stage = chain_[op.stage];
    detail::check_input_count("Execution", chain_, op.stage,
                              boundaries_[i]->tensors.size());
    check_unchanged(*boundaries_[i], stage,
                    "modified in place by other code after it was kept");
    const RunScope run(boundaries_[i]->tensors);
    if (!recomputing && schedule_.runs(op.stage) > 1) {
      contexts_[i].emplace(boundaries_[i]->tensors, stage.modules(),
                           options_.generators);
    }

    Tensors outputs;
    {
      std::optional<RecomputeGuard> guard;
      if (recomputing) guard.emplace(*contexts_[i]);
      const OutputsUnused unused(schedule_.leaves_outputs_unused(cursor_));
      if (!shares_graph_[i] || !keep) open_.emplace();
      outputs = call(stage, op,
                     shares_graph_[i] && keep
                         ? boundaries_[i]->tensors
                         : open_->begin(boundaries_[i]->tensors,
                                        boundaries_[i]->requires_grad));
    }
    --runs_left_[i];
    if (!recomputing && contexts_[i]) contexts_[i]->finish_first_run();
    if (runs_left_[i] == 0) contexts_[i].reset();
    check_unchanged(*boundaries_[i], stage,
                    "modified in place by the stage itself; merge the stage "
                    "with the one before it, or use an out-of-place operator");
    check_shapes(outputs, stage, i, recomputing);

    if (op.kind != OpKind::kForwardKeepInput) boundaries_[i].reset();
    auto needs_grad = which_require_grad(outputs);
    if (keep && next_shares_graph(op.stage)) {
      hold(i + 1, Boundary(std::move(outputs), std::move(needs_grad)));
      return;
    }
    if (keep) {
      open_->end(outputs);
      graphs_[i] = std::move(open_);
    }
    open_.reset();
    hold(i + 1, Boundary(detach_all(outputs), std::move(needs_grad)));
  }

  Tensors call(const Stage& stage, const Op& op, const Tensors& inputs) {
    const CurrentModules modules(stage.modules());
    if (op.kind != OpKind::kForwardKeep) {
      // The graph is built nevertheless, so that operators that select a kernel
      // by it select the same one as in the kept run. No tensors are saved.
      const NoSaveScope no_save;
      return stage(inputs);
    }
    const HostRuns host;
    Tensors outputs = call_kept(stage.function(op.variant), op.stage, inputs);
    host_runs_[static_cast<size_t>(op.stage)] = host.list();
    return outputs;
  }

  Tensors call_kept(const Stage::Function& function, int stage,
                    const Tensors& inputs) const {
    if (options_.meter == nullptr) return function(inputs);
    const KeptMeter::Scope scope(*options_.meter, stage);
    return function(inputs);
  }

  static void check_unchanged(const Boundary& input, const Stage& stage,
                              const char* what) {
    const auto changed = input.first_changed();
    TORCH_CHECK(!changed, "[Execution] input ", changed.value_or(0),
                " of stage '", stage.name(), "' was ", what);
  }

  void check_shapes(const Tensors& outputs, const Stage& stage, size_t i,
                    bool recomputing) {
    detail::check_outputs("Execution", chain_, static_cast<int>(i), outputs);
    if (schedule_.runs(static_cast<int>(i)) == 1) return;
    std::vector<TensorShape> shapes(outputs.begin(), outputs.end());
    TORCH_CHECK(
        !recomputing || shapes == output_shapes_[i],
        "[Execution] expected stage '", stage.name(),
        "' to return tensors of the same types and shapes when recomputed (",
        describe(output_shapes_[i]), "), got (", describe(shapes),
        "); a stage may depend on its inputs, parameters, buffers and "
        "random numbers only");
    output_shapes_[i] = std::move(shapes);
  }

  void hold(size_t i, Boundary boundary) {
    if (options_.meter != nullptr) {
      // The chain's output is counted for the last stage.
      const int stage = std::min(static_cast<int>(i), chain_.size() - 1);
      for (const auto& tensor : boundary.tensors) {
        if (tensor.defined()) {
          boundary.counted.push_back(options_.meter->hold(tensor, stage));
        }
      }
    }
    boundaries_[i].emplace(std::move(boundary));
  }

  void release() {
    boundaries_.clear();
    graphs_.clear();
    open_.reset();
    contexts_.clear();
    host_runs_.clear();
    gradients_.clear();
    pending_ = false;
  }

  Chain chain_;
  Schedule schedule_;
  ExecutionOptions options_;

  std::vector<std::optional<Boundary>> boundaries_;
  std::vector<TiedParameter> tied_;  // empty if there is only one graph
  // Whether a stage shares the graph of the one before.
  std::vector<bool> shares_graph_;
  std::optional<StageGraph> open_;  // graph that the next stage may share
  // Stored at the last stage of each graph.
  std::vector<std::optional<StageGraph>> graphs_;
  std::vector<std::optional<RecomputeContext>> contexts_;
  std::vector<HostRuns::List> host_runs_;  // by stage
  // Of the first run, by stage.
  std::vector<std::vector<TensorShape>> output_shapes_;
  std::vector<int> runs_left_;  // by stage
  std::vector<bool> outputs_require_grad_;
  std::vector<bool> output_defined_;
  Tensors gradients_;  // of the current boundary
  size_t cursor_ = 0;
  bool accumulate_ = true;
  bool pending_ = false;
};

int graph_count(const Schedule& schedule) {
  const auto shares_graph = find_shared_graphs(schedule);
  return static_cast<int>(
      std::count(shares_graph.begin(), shares_graph.end(), false));
}

Execution::Execution(Chain chain, Schedule schedule, ExecutionOptions options)
    : impl_(std::make_unique<Impl>(std::move(chain), std::move(schedule),
                                   std::move(options))) {}
Execution::~Execution() = default;
Execution::Execution(Execution&&) noexcept = default;
Execution& Execution::operator=(Execution&&) noexcept = default;

Tensors Execution::forward(const Tensors& inputs) {
  return impl_->forward(inputs);
}

Tensors Execution::backward(Tensors gradients, bool accumulate) {
  return impl_->backward(std::move(gradients), accumulate);
}

bool Execution::pending() const {
  return impl_->pending();
}

const std::vector<bool>& Execution::outputs_require_grad() const {
  return impl_->outputs_require_grad();
}

}  // namespace reprise
