#include "recompute/boundary.h"
#include "recompute/failed_backward.h"
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
#include <utility>

namespace reprise {

using detail::Boundary;
using detail::FailedBackward;
using detail::GraphBackward;
using detail::TensorShape;

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
    failed_.reset();
    rest_.reset();
    aside_.reset();
    input_count_ = inputs.size();
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
      hold(0, Boundary(detail::detach_all(inputs),
                       detail::which_require_grad(inputs)));
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
    detail::check_gradients("Execution", chain_, gradients, output_defined_);
    gradients_ = std::move(gradients);
    accumulate_ = accumulate;
    reported_ = kNothing;
    most_held_ = std::exchange(next_most_held_, std::nullopt);
    // What earlier micro-batches have added must not be lost in a failed backward.
    aside_.emplace(!accumulate  ? std::vector<ParameterUse>{}
                   : most_held_ ? uses_
                                : tied_);
    return run_backward();
  }

  void allow_continuing(int64_t most_held_bytes) {
    if (uses_.empty()) uses_ = parameter_uses(chain_);
    next_most_held_ = most_held_bytes;
  }

  int stages_left() const { return failed_ ? failed_->stages_left : 0; }

  void rerun_forward(const Tensors& inputs, const Schedule& schedule) {
    TORCH_CHECK(failed_,
                "[Execution] expected a failed backward that can be continued; "
                "see stages_left()");
    ExecutionOptions options{.memory = options_.memory,
                             .generators = options_.generators,
                             .final_from = [this](int s) { report_final(s); },
                             .brings_gradient = options_.brings_gradient};
    for (const int cut : options_.cuts) {
      if (cut < failed_->stages_left) options.cuts.push_back(cut);
    }
    rest_ = std::make_unique<Impl>(
        detail::first_stages(chain_, failed_->stages_left), schedule,
        std::move(options));
    rest_->uses_ = uses_;  // other stages may use its parameters, too
    rest_->tied_.clear();  // they are aside
    rest_->reported_ = failed_->stages_left;
    rest_->most_held_ = most_held_;
    try {
      rest_->forward(inputs);
    } catch (...) {
      rest_.reset();
      throw;
    }
  }

  Tensors continue_backward() {
    TORCH_CHECK(rest_, "[Execution] expected rerun_forward() before");
    const std::unique_ptr<Impl> rest = std::move(rest_);
    if (!rest->pending_) {  // no stage needs a gradient
      failed_.reset();
      report_final(0);
      return Tensors(input_count_);
    }
    rest->gradients_ = failed_->gradients;
    try {
      Tensors result = rest->run_backward();
      failed_.reset();
      return result;
    } catch (...) {
      failed_ = std::move(rest->failed_);
      if (!failed_) put_back();
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

  /// Runs the operations of the backward from cursor_ on.
  Tensors run_backward() {
    reporting_ = false;
    try {
      for (; cursor_ < schedule_.ops().size(); ++cursor_) {
        const Op& op = schedule_.ops()[cursor_];
        const bool runs_graph = op.kind == OpKind::kBackward &&
                                graphs_[static_cast<size_t>(op.stage)];
        const int first = runs_graph ? first_of_graph(op.stage) : 0;
        in_graph_ = runs_graph;
        if (runs_graph && most_held_ &&
            detail::bytes_of(gradients_) <= *most_held_) {
          running_.emplace(first, op.stage, gradients_, uses_,
                           options_.brings_gradient);
        }
        run_op(op);
        running_.reset();
        in_graph_ = false;
        if (first > 0) report_final(first);
      }
      report_final(0);
      Tensors result = std::move(gradients_);
      release();
      return result;
    } catch (...) {
      note_failure();
      release();
      throw;
    }
  }

  void report_final(int stage) {
    reporting_ = true;
    if (aside_) aside_->finish(stage);
    if (stage == 0) aside_.reset();
    if (accumulate_ && options_.final_from) options_.final_from(stage);
    reporting_ = false;
    reported_ = stage;
  }

  /// Notes where a failed backward can be continued, and drops what it has added to the
  /// gradients since.
  void note_failure() {
    failed_.reset();
    const bool possible =
        most_held_ && accumulate_ && !reporting_ && reported_ != kNothing &&
        (!in_graph_ || (running_ && running_->can_be_repeated()));
    if (!possible) return put_back();
    failed_ = {reported_,
               running_ ? running_->take_gradients() : std::move(gradients_)};
    detail::drop_gradients(uses_, reported_, running_ ? &*running_ : nullptr,
                           options_.brings_gradient);
  }

  /// Adds what was set aside to the gradients that there are.
  void put_back() {
    if (aside_) aside_->finish(0);
    aside_.reset();
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
    boundaries_[i]->check_unchanged(
        stage.name(), "modified in place by other code after it was kept");
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
    boundaries_[i]->check_unchanged(
        stage.name(),
        "modified in place by the stage itself; merge the stage "
        "with the one before it, or use an out-of-place operator");
    check_shapes(outputs, stage, i, recomputing);

    if (op.kind != OpKind::kForwardKeepInput) boundaries_[i].reset();
    auto needs_grad = detail::which_require_grad(outputs);
    if (keep && next_shares_graph(op.stage)) {
      hold(i + 1, Boundary(std::move(outputs), std::move(needs_grad)));
      return;
    }
    if (keep) {
      open_->end(outputs);
      graphs_[i] = std::move(open_);
    }
    open_.reset();
    hold(i + 1, Boundary(detail::detach_all(outputs), std::move(needs_grad)));
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

  void check_shapes(const Tensors& outputs, const Stage& stage, size_t i,
                    bool recomputing) {
    detail::check_outputs("Execution", chain_, static_cast<int>(i), outputs);
    if (schedule_.runs(static_cast<int>(i)) == 1) return;
    std::vector<TensorShape> shapes(outputs.begin(), outputs.end());
    if (recomputing) {
      detail::check_same_shapes(stage.name(), output_shapes_[i], shapes);
    }
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
    running_.reset();
    pending_ = false;
  }

  static constexpr int kNothing = -1;

  Chain chain_;
  Schedule schedule_;
  ExecutionOptions options_;

  std::vector<std::optional<Boundary>> boundaries_;
  std::vector<ParameterUse> uses_;  // of all parameters, to continue
  std::vector<ParameterUse> tied_;  // empty if there is only one graph
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
  size_t input_count_ = 0;
  bool accumulate_ = true;
  bool pending_ = false;

  // For continuing a failed backward. Empty: not allowed.
  std::optional<int64_t> most_held_, next_most_held_;
  std::optional<TiedGradients> aside_;    // during a backward
  std::optional<GraphBackward> running_;  // during that of a graph
  int reported_ = kNothing;  // first stage whose gradients are final
  bool reporting_ = false, in_graph_ = false;
  std::optional<FailedBackward> failed_;
  std::unique_ptr<Impl> rest_;  // the stages that are left
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

void Execution::allow_continuing(int64_t most_held_bytes) {
  impl_->allow_continuing(most_held_bytes);
}

int Execution::stages_left() const {
  return impl_->stages_left();
}

void Execution::rerun_forward(const Tensors& inputs, const Schedule& schedule) {
  impl_->rerun_forward(inputs, schedule);
}

Tensors Execution::continue_backward() {
  return impl_->continue_backward();
}

bool Execution::pending() const {
  return impl_->pending();
}

const std::vector<bool>& Execution::outputs_require_grad() const {
  return impl_->outputs_require_grad();
}

}  // namespace reprise
