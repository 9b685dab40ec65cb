#include <reprise/recompute/simulate.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace reprise {
namespace {

/// Counts the references to every buffer. A recomputed stage creates new
/// buffers, even while the old ones are still held.
class Simulator {
 public:
  Simulator(const Schedule& schedule, const ChainCosts& chain_costs)
      : schedule_(schedule), chain_costs_(chain_costs) {
    const auto n = static_cast<size_t>(schedule.stages());
    boundaries_.resize(n + 1);
    graphs_.resize(n);
    result_.runs.resize(n);
    kept_runs_.resize(n);
    fetched_.resize(n);
    std::vector<int> input;
    for (const int64_t bytes : chain_costs.input_bytes) {
      input.push_back(make_buffer(bytes, kCaller));
    }
    hold(0, input);
    record_kept();
  }

  Simulation run() {
    const auto& ops = schedule_.ops();
    for (size_t i = 0; i < ops.size(); ++i) {
      if (i == schedule_.forward_ops()) finish_forward();
      step(ops[i], i);
    }
    for (const int runs : result_.runs) result_.total_runs += runs;
    result_.time_ms = std::max(result_.time_ms, launch_ms_);
    result_.at_peak.kept_by_stage.resize(result_.runs.size());
    for (size_t i = 0; i < changes_at_peak_; ++i) {
      result_.at_peak.kept_by_stage[changes_[i].stage] += changes_[i].bytes;
    }
    return std::move(result_);
  }

 private:
  static constexpr int kCaller = -1;

  struct Buffer {
    int64_t bytes;
    int stage;             // stage that created it
    bool owned_by_caller;  // the caller holds it too
    int references = 0;    // from boundaries and graphs
  };
  struct Change {  // of the live bytes of a stage
    size_t stage;
    int64_t bytes;
  };
  using List = std::vector<int>;  // indices into buffers_

  int make_buffer(int64_t bytes, int stage) {
    buffers_.push_back({bytes, stage, stage == kCaller});
    return static_cast<int>(buffers_.size()) - 1;
  }

  void add_references(const List& list, int change) {
    for (const int b : list) {
      Buffer& buffer = buffers_[static_cast<size_t>(b)];
      const bool was = buffer.references > 0;
      buffer.references += change;
      const bool is = buffer.references > 0;
      if (was == is) continue;
      const int64_t bytes = is ? buffer.bytes : -buffer.bytes;
      kept_ += bytes;
      if (buffer.owned_by_caller || bytes == 0) continue;
      live_ += bytes;
      changes_.push_back({static_cast<size_t>(buffer.stage), bytes});
    }
  }

  void record_kept() {
    result_.kept_peak_bytes = std::max(result_.kept_peak_bytes, kept_);
  }

  void hold(size_t boundary, List list) {
    add_references(list, +1);
    boundaries_[boundary] = std::move(list);
  }

  void release(std::optional<List>& list) {
    if (!list) return;
    add_references(*list, -1);
    list.reset();
  }

  void record_usage(int64_t workspace, size_t op) {
    const int64_t bytes = live_ + gradient_ + workspace;
    if (bytes <= result_.peak_bytes) return;
    result_.peak_bytes = bytes;
    result_.peak_op = op;
    result_.at_peak.gradient_bytes = gradient_;
    result_.at_peak.workspace_bytes = workspace;
    changes_at_peak_ = changes_.size();
  }

  void step(const Op& op, size_t index) {
    const auto i = static_cast<size_t>(op.stage);
    switch (op.kind) {
      case OpKind::kForwardKeep:
      case OpKind::kForwardDrop:
      case OpKind::kForwardKeepInput:
        forward(op, index);
        break;
      case OpKind::kBackward: {
        const KeptRunCosts& kept = *kept_runs_[i];
        const int64_t back = fetched_[i] ? kept.host_bytes : 0;
        record_usage(std::max<int64_t>(0, kept.backward_extra_bytes - back),
                     index);
        release(graphs_[i]);
        release(fetched_[i]);
        hold_context(op.stage, -1);
        host_ -= kept.host_bytes;
        gradient_ = chain_costs_.stages[i].input_gradient_bytes;
        result_.time_ms += kept.backward_ms;
        launch_ms_ += kept.backward_launch_ms;
        break;
      }
      case OpKind::kDiscard:
        release(boundaries_[i]);
        break;
      case OpKind::kFetch:
        if (fetched_[i]) break;
        fetched_[i] = {make_buffer(kept_runs_[i]->host_bytes, op.stage)};
        add_references(*fetched_[i], +1);
        record_kept();
        record_usage(0, index);
        break;
    }
  }

  /// Allocates the copies of the stage's buffers if `sign` is 1, frees them if
  /// it is -1.
  void hold_context(int stage, int sign) {
    const auto i = static_cast<size_t>(stage);
    const int64_t bytes = sign * chain_costs_.stages[i].context_bytes;
    if (bytes == 0 || schedule_.runs(stage) == 1) return;
    live_ += bytes;
    changes_.push_back({i, bytes});
  }

  void forward(const Op& op, size_t index) {
    const auto i = static_cast<size_t>(op.stage);
    const StageCosts& stage = chain_costs_.stages[i];
    const bool keep = op.kind == OpKind::kForwardKeep;
    const KeptRunCosts& run = stage.kept_run(op.variant);
    const bool recomputing = result_.runs[i] > 0;
    if (!recomputing) hold_context(op.stage, +1);
    const List input = *boundaries_[i];
    List output;
    for (const auto& buffer : stage.outputs) {
      output.push_back(buffer.input >= 0
                           ? input.at(static_cast<size_t>(buffer.input))
                           : make_buffer(buffer.bytes, op.stage));
    }
    if (keep) {
      List saved;
      for (const int s : run.saved_inputs) {
        saved.push_back(input.at(static_cast<size_t>(s)));
      }
      for (const int s : run.saved_outputs) {
        saved.push_back(output.at(static_cast<size_t>(s)));
      }
      if (run.saved_bytes > 0) {
        saved.push_back(make_buffer(run.saved_bytes, op.stage));
      }
      kept_runs_[i] = &run;
      host_ += run.host_bytes;
      result_.host_peak_bytes = std::max(result_.host_peak_bytes, host_);
      add_references(saved, +1);
      record_kept();
      graphs_[i] = std::move(saved);
    }
    hold(i + 1, std::move(output));
    record_usage((keep ? run.keep_extra_bytes : stage.drop_extra_bytes) +
                     (recomputing ? stage.context_bytes : 0),
                 index);
    if (op.kind != OpKind::kForwardKeepInput) release(boundaries_[i]);
    record_kept();  // the output is held when the input is released
    ++result_.runs[i];
    result_.time_ms += run.forward_ms;
    if (schedule_.leaves_outputs_unused(index)) {
      result_.time_ms -= run.unused_output_ms;
    }
    launch_ms_ += run.forward_launch_ms;
  }

  /// Passes the output to the caller, who holds it until the end.
  void finish_forward() {
    for (const int b : *boundaries_.back()) {
      buffers_[static_cast<size_t>(b)].owned_by_caller = true;
    }
    release(boundaries_.back());
    result_.kept_after_forward_bytes = kept_;
    gradient_ = chain_costs_.output_gradient_bytes;
  }

  const Schedule& schedule_;
  const ChainCosts& chain_costs_;
  std::vector<Buffer> buffers_;
  std::vector<std::optional<List>> boundaries_;
  std::vector<std::optional<List>> graphs_;
  // Activations fetched from host memory.
  std::vector<std::optional<List>> fetched_;
  // Costs of the run that created the graph.
  std::vector<const KeptRunCosts*> kept_runs_;
  // Changes are recorded and summed once at the end. Copying the live bytes per
  // stage at every new peak would take time proportional to stages ×
  // operations.
  std::vector<Change> changes_;
  size_t changes_at_peak_ = 0;
  int64_t kept_ = 0;      // bytes of kept buffers, including the input
  int64_t live_ = 0;      // live bytes minus those before the forward pass
  int64_t gradient_ = 0;  // bytes of the current boundary's gradients
  int64_t host_ = 0;      // bytes in host memory
  double launch_ms_ = 0;
  Simulation result_;
};

}  // namespace

StageCosts StageCosts::simple(int64_t output_bytes, int64_t saved_bytes,
                              double forward_ms, double backward_ms) {
  StageCosts costs;
  costs.outputs = {{output_bytes, -1}};
  costs.saved_inputs = {0};
  costs.saved_outputs = {0};
  costs.saved_bytes = saved_bytes;
  costs.input_gradient_bytes = output_bytes;
  costs.backward_extra_bytes = output_bytes;
  costs.forward_ms = forward_ms;
  costs.backward_ms = backward_ms;
  return costs;
}

ChainCosts ChainCosts::simple(int64_t input_bytes,
                              std::vector<StageCosts> stages) {
  ChainCosts chain_costs;
  chain_costs.input_bytes = {input_bytes};
  if (!stages.empty()) {
    chain_costs.output_gradient_bytes = stages.back().outputs.at(0).bytes;
  }
  chain_costs.stages = std::move(stages);
  return chain_costs;
}

Simulation simulate(const Schedule& schedule, const ChainCosts& chain_costs) {
  TORCH_CHECK(
      chain_costs.stages.size() == static_cast<size_t>(schedule.stages()),
      "[simulate] expected costs for ", schedule.stages(), " stages, got ",
      chain_costs.stages.size());
  for (const Op& op : schedule.ops()) {
    if (op.variant == 0) continue;
    const auto known =
        chain_costs.stages[static_cast<size_t>(op.stage)].variants.size();
    TORCH_CHECK(static_cast<size_t>(op.variant) <= known,
                "[simulate] expected costs for variant ", op.variant,
                " of stage ", op.stage, ", got ", known, " variants");
  }
  return Simulator(schedule, chain_costs).run();
}

}  // namespace reprise
