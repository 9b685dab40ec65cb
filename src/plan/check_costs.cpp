#include "plan/check_costs.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <utility>
#include <vector>

namespace reprise::detail {
namespace {

// Sums of all that a profile may have fit in 63 bits.
constexpr int64_t kMostBytes = int64_t{1} << 46;
constexpr size_t kMostStages = 1 << 14;
constexpr size_t kMostTensors = 1 << 16;  // inputs or outputs of a stage
constexpr int64_t kMostInBatch = 1'000'000'000;
constexpr double kMostMs = 1e10;
constexpr double kMostFactor = 1e6;

/// Collects the first thing that is wrong.
class Checker {
 public:
  std::string check(const CostProfile& p) {
    stages_ = p.stages.empty() && !p.sizes.empty()
                  ? p.sizes.front().chain_costs.stages.size()
                  : p.stages.size();
    expect(stages_ <= kMostStages, "fewer stages");
    check_profile(p);
    for (size_t i = 0; i < p.sizes.size() && problem_.empty(); ++i) {
      expect(i == 0 || p.sizes[i - 1].micro_batch < p.sizes[i].micro_batch,
             "sizes in ascending order");
      check_size(p.sizes[i]);
      expect(p.sizes[i].chain_costs.input_bytes.size() ==
                 p.sizes[0].chain_costs.input_bytes.size(),
             "the same inputs at every size");
    }
    for (const TriedSchedule& one : p.tried) check_tried(one);
    return problem_;
  }

 private:
  void expect(bool right, const char* what) {
    if (!right && problem_.empty()) problem_ = std::string("expected ") + what;
  }
  void bytes(std::initializer_list<int64_t> values) {
    for (const int64_t value : values) {
      expect(value >= 0 && value <= kMostBytes, "sizes in bytes");
    }
  }
  void bytes(const std::vector<int64_t>& values) {
    for (const int64_t value : values) bytes({value});
  }
  void ms(std::initializer_list<double> values) {
    for (const double value : values) {
      expect(value >= 0 && value <= kMostMs, "times in milliseconds");
    }
  }
  void indices(const std::vector<int>& list, size_t count) {
    expect(list.size() <= kMostTensors, "fewer saved tensors");
    for (const int index : list) {
      expect(index >= 0 && static_cast<size_t>(index) < count,
             "saved tensors that the stage has");
    }
  }
  /// A list with a value for each stage, or none.
  void per_stage(const std::vector<int64_t>& values) {
    expect(values.empty() || values.size() == stages_,
           "a value for each of the stages");
    bytes(values);
  }

  void check_profile(const CostProfile& p) {
    for (const auto* list :
         {&p.gradient_bytes, &p.held_twice_bytes, &p.final_gradient_bytes,
          &p.stage_update_bytes, &p.moved_bytes, &p.moved_gradient_bytes,
          &p.stage_parameter_bytes, &p.stage_wire_bytes}) {
      per_stage(*list);
    }
    // Tests and examples describe costs without naming stages.
    const bool named = !p.stages.empty();
    expect(!named || (p.gradient_bytes.size() == stages_ &&
                      p.held_twice_bytes.size() == stages_),
           "the gradients of each of the stages");
    expect(p.moved_bytes.size() == p.moved_gradient_bytes.size(),
           "gradients of the parameters in host memory");
    bytes({p.fixed.parameters, p.fixed.gradients, p.fixed.optimizer,
           p.fixed.data, p.fixed.workspace, p.update_bytes,
           p.host_state_bytes});
    ms({p.update_ms, p.backward_update_ms, p.gather_delay_ms});
    for (const double speed :
         {p.to_device_bytes_per_ms, p.to_host_bytes_per_ms}) {
      expect(speed >= 0 && std::isfinite(speed), "speeds of copies");
    }
  }

  void check_kept_run(const KeptRunCosts& run, size_t inputs, size_t outputs) {
    indices(run.saved_inputs, inputs);
    indices(run.saved_outputs, outputs);
    bytes({run.saved_bytes, run.host_bytes, run.keep_extra_bytes,
           run.backward_extra_bytes, run.first_backward_extra_bytes});
    ms({run.forward_ms, run.backward_ms, run.forward_launch_ms,
        run.backward_launch_ms, run.unused_output_ms});
  }

  void check_size(const SizeCosts& size) {
    const ChainCosts& chain = size.chain_costs;
    expect(size.micro_batch > 0 && size.micro_batch <= kMostInBatch,
           "a positive micro-batch");
    expect(chain.stages.size() == stages_, "the costs of each stage");
    bytes({size.data_bytes, size.prepare_bytes, size.workspace_bytes,
           size.graph_workspace_bytes, chain.output_gradient_bytes});
    bytes(chain.input_bytes);
    ms({size.other_ms});
    for (const double factor :
         {size.separate_graphs_factor, size.single_graph_factor}) {
      expect(factor > 0 && factor <= kMostFactor, "positive factors");
    }
    size_t inputs = chain.input_bytes.size();
    for (const StageCosts& stage : chain.stages) {
      expect(stage.outputs.size() <= kMostTensors, "fewer outputs");
      for (const StageCosts::Buffer& output : stage.outputs) {
        bytes({output.bytes});
        expect(output.input >= -1 && output.input < static_cast<int>(inputs),
               "outputs that share memory with an input of the stage");
      }
      bytes({stage.input_gradient_bytes, stage.drop_extra_bytes,
             stage.context_bytes});
      check_kept_run(stage, inputs, stage.outputs.size());
      for (const auto& variant : stage.variants) {
        check_kept_run(variant, inputs, stage.outputs.size());
      }
      inputs = stage.outputs.size();
    }
  }

  void check_tried(const TriedSchedule& one) {
    expect(one.micro_batch > 0 && one.micro_batch <= kMostInBatch,
           "a positive micro-batch");
    expect(one.ms > 0 && one.ms <= kMostMs, "times in milliseconds");
    expect(one.extra_bytes >= -kMostBytes && one.extra_bytes <= kMostBytes,
           "sizes in bytes");
  }

  size_t stages_ = 0;
  std::string problem_;
};

/// Why a schedule cannot be run by the stages of a profile.
std::string problem_of(const CostProfile& profile, const TriedSchedule& one) {
  const auto stages = static_cast<int>(profile.stages.size());
  try {
    const Schedule schedule = Schedule::parse("tried", stages, one.schedule);
    for (const SizeCosts& size : profile.sizes) {
      for (const Op& op : schedule.ops()) {
        const auto stage = static_cast<size_t>(op.stage);
        if (stage >= size.chain_costs.stages.size()) continue;  // a discard
        const size_t variants = size.chain_costs.stages[stage].variants.size();
        if (static_cast<size_t>(op.variant) > variants) {
          return fmt::format("expected variant {} of stage {}", op.variant,
                             op.stage);
        }
      }
    }
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

}  // namespace

std::string why_not_usable(const CostProfile& profile) {
  std::string problem = Checker().check(profile);
  for (const TriedSchedule& one : profile.tried) {
    if (problem.empty()) problem = problem_of(profile, one);
  }
  return problem;
}

}  // namespace reprise::detail
