#include <reprise/recompute/simulate.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace reprise {
namespace {

/// Follows every buffer that exists, by who refers to it. A stage that runs
/// again makes new buffers, even while the old ones are still held.
class Simulator {
 public:
  Simulator(const Schedule& schedule, const ChainCosts& figures)
      : schedule_(schedule), figures_(figures) {
    const auto n = static_cast<size_t>(schedule.stages());
    boundaries_.resize(n + 1);
    graphs_.resize(n);
    result_.runs.resize(n);
    kept_as_.resize(n);
    fetched_.resize(n);
    std::vector<int> input;
    for (const int64_t bytes : figures.input_bytes) {
      input.push_back(make_buffer(bytes, kCallers));
    }
    hold(0, input);
    note_kept();
  }

  Simulation run() {
    const auto& ops = schedule_.ops();
    for (size_t i = 0; i < ops.size(); ++i) {
      if (i == schedule_.forward_ops()) finish_forward();
      step(ops[i], i);
    }
    for (const int runs : result_.runs) result_.total_runs += runs;
    result_.time_ms = std::max(result_.time_ms, host_ms_);
    result_.at_peak.kept_by_stage.resize(result_.runs.size());
    for (size_t i = 0; i < changes_at_peak_; ++i) {
      result_.at_peak.kept_by_stage[changes_[i].stage] += changes_[i].bytes;
    }
    return std::move(result_);
  }

 private:
  static constexpr int kCallers = -1;

  struct Buffer {
    int64_t bytes;
    int stage;        // that made it
    bool callers;     // the caller has it too
    int kept_by = 0;  // boundaries and graphs
  };
  struct Change {  // of what is live
    size_t stage;
    int64_t bytes;
  };
  using List = std::vector<int>;  // positions in buffers_

  int make_buffer(int64_t bytes, int stage) {
    buffers_.push_back({bytes, stage, stage == kCallers});
    return static_cast<int>(buffers_.size()) - 1;
  }

  void refer(const List& list, int change) {
    for (const int b : list) {
      Buffer& buffer = buffers_[static_cast<size_t>(b)];
      const bool was = buffer.kept_by > 0;
      buffer.kept_by += change;
      const bool is = buffer.kept_by > 0;
      if (was == is) continue;
      const int64_t bytes = is ? buffer.bytes : -buffer.bytes;
      kept_ += bytes;
      if (buffer.callers || bytes == 0) continue;
      live_ += bytes;
      changes_.push_back({static_cast<size_t>(buffer.stage), bytes});
    }
  }

  void note_kept() {
    result_.kept_peak_bytes = std::max(result_.kept_peak_bytes, kept_);
  }

  void hold(size_t boundary, List list) {
    refer(list, +1);
    boundaries_[boundary] = std::move(list);
  }

  void release(std::optional<List>& list) {
    if (!list) return;
    refer(*list, -1);
    list.reset();
  }

  void reach(int64_t workspace, size_t op) {
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
        const KeptRunCosts& kept = *kept_as_[i];
        const int64_t back = fetched_[i] ? kept.host_bytes : 0;
        reach(std::max<int64_t>(0, kept.backward_extra_bytes - back), index);
        release(graphs_[i]);
        release(fetched_[i]);
        hold_context(op.stage, -1);
        host_ -= kept.host_bytes;
        gradient_ = figures_.stages[i].input_gradient_bytes;
        result_.time_ms += kept.backward_ms;
        host_ms_ += kept.backward_host_ms;
        break;
      }
      case OpKind::kDiscard:
        release(boundaries_[i]);
        break;
      case OpKind::kFetch:
        if (fetched_[i]) break;
        fetched_[i] = {make_buffer(kept_as_[i]->host_bytes, op.stage)};
        refer(*fetched_[i], +1);
        note_kept();
        reach(0, index);
        break;
    }
  }

  /// `sign`: 1 takes the copies of the stage's buffers, -1 lets them go.
  void hold_context(int stage, int sign) {
    const auto i = static_cast<size_t>(stage);
    const int64_t bytes = sign * figures_.stages[i].context_bytes;
    if (bytes == 0 || schedule_.runs(stage) == 1) return;
    live_ += bytes;
    changes_.push_back({i, bytes});
  }

  void forward(const Op& op, size_t index) {
    const auto i = static_cast<size_t>(op.stage);
    const StageCosts& stage = figures_.stages[i];
    const bool keep = op.kind == OpKind::kForwardKeep;
    const KeptRunCosts& run = stage.kept_as(op.variant);
    const bool again = result_.runs[i] > 0;
    if (!again) hold_context(op.stage, +1);
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
      kept_as_[i] = &run;
      host_ += run.host_bytes;
      result_.host_peak_bytes = std::max(result_.host_peak_bytes, host_);
      refer(saved, +1);
      note_kept();
      graphs_[i] = std::move(saved);
    }
    hold(i + 1, std::move(output));
    reach((keep ? run.keep_extra_bytes : stage.drop_extra_bytes) +
              (again ? stage.context_bytes : 0),
          index);
    if (op.kind != OpKind::kForwardKeepInput) release(boundaries_[i]);
    note_kept();  // the output is held when the input is let go
    ++result_.runs[i];
    result_.time_ms += run.forward_ms;
    host_ms_ += run.forward_host_ms;
  }

  /// The output goes to the caller, who has it to the end.
  void finish_forward() {
    for (const int b : *boundaries_.back()) {
      buffers_[static_cast<size_t>(b)].callers = true;
    }
    release(boundaries_.back());
    result_.kept_after_forward_bytes = kept_;
    gradient_ = figures_.output_gradient_bytes;
  }

  const Schedule& schedule_;
  const ChainCosts& figures_;
  std::vector<Buffer> buffers_;
  std::vector<std::optional<List>> boundaries_;
  std::vector<std::optional<List>> graphs_;
  std::vector<std::optional<List>> fetched_;  // brought back ahead of need
  std::vector<const KeptRunCosts*> kept_as_;  // the run that made the graph
  // All changes are noted and summed up once, at the end: a copy of what is
  // live by stage at every new peak would take stages × operations.
  std::vector<Change> changes_;
  size_t changes_at_peak_ = 0;
  int64_t kept_ = 0;      // bytes of buffers kept, the input's included
  int64_t live_ = 0;      // rise over the memory before the forward
  int64_t gradient_ = 0;  // of the boundary that the backward has reached
  int64_t host_ = 0;      // in the host's memory
  double host_ms_ = 0;
  Simulation result_;
};

}  // namespace

StageCosts StageCosts::simple(int64_t output_bytes, int64_t saved_bytes,
                              double forward_ms, double backward_ms) {
  StageCosts figures;
  figures.outputs = {{output_bytes, -1}};
  figures.saved_inputs = {0};
  figures.saved_outputs = {0};
  figures.saved_bytes = saved_bytes;
  figures.input_gradient_bytes = output_bytes;
  figures.backward_extra_bytes = output_bytes;
  figures.forward_ms = forward_ms;
  figures.backward_ms = backward_ms;
  return figures;
}

ChainCosts ChainCosts::simple(int64_t input_bytes,
                              std::vector<StageCosts> stages) {
  ChainCosts figures;
  figures.input_bytes = {input_bytes};
  if (!stages.empty()) {
    figures.output_gradient_bytes = stages.back().outputs.at(0).bytes;
  }
  figures.stages = std::move(stages);
  return figures;
}

Simulation simulate(const Schedule& schedule, const ChainCosts& figures) {
  TORCH_CHECK(figures.stages.size() == static_cast<size_t>(schedule.stages()),
              "[simulate] expected figures for ", schedule.stages(),
              " stages, got ", figures.stages.size());
  for (const Op& op : schedule.ops()) {
    if (op.variant == 0) continue;
    const auto known =
        figures.stages[static_cast<size_t>(op.stage)].variants.size();
    TORCH_CHECK(static_cast<size_t>(op.variant) <= known,
                "[simulate] expected figures for variant ", op.variant,
                " of stage ", op.stage, ", got ", known, " variants");
  }
  return Simulator(schedule, figures).run();
}

}  // namespace reprise
