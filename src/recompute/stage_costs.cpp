#include "compat/saved_tensors.h"
#include "recompute/gradient_layout.h"
#include "recompute/no_save_scope.h"
#include "recompute/recompute_context.h"
#include "recompute/stage_graph.h"
#include "recompute/stage_times.h"
#include "recompute/storages.h"

#include <reprise/memory/meter.h>
#include <reprise/recompute/host_memory.h>
#include <reprise/recompute/stage_costs.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <unordered_set>
#include <utility>

namespace reprise {
namespace {

using compat::Timestamp;
using detail::Storages;

/// Records the tensors that autograd saves. They are saved as usual.
class RecordingPolicy final : public compat::SavedTensorPolicy {
 public:
  std::unique_ptr<compat::SavedTensorHooks> make_hooks() override {
    return std::make_unique<Hooks>(*this);
  }
  Tensors saved;  // holds them, so that no storage address is reused

 private:
  struct Hooks final : compat::SavedTensorHooks {
    explicit Hooks(RecordingPolicy& policy) : policy(&policy) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      value = tensor.detach();
      policy->saved.push_back(value);
    }
    at::Tensor call_unpack_hook() override { return value; }
    RecordingPolicy* policy;
    torch::Tensor value;
  };
};

/// Sets the parameters' gradients aside and restores them at the end.
class GradientsSetAside {
 public:
  explicit GradientsSetAside(std::vector<torch::Tensor> parameters)
      : parameters_(std::move(parameters)) {
    for (auto& parameter : parameters_) {
      gradients_.push_back(std::exchange(parameter.mutable_grad(), {}));
    }
  }
  ~GradientsSetAside() {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      parameters_[i].mutable_grad() = gradients_[i];
    }
  }
  GradientsSetAside(const GradientsSetAside&) = delete;
  GradientsSetAside& operator=(const GradientsSetAside&) = delete;

 private:
  std::vector<torch::Tensor> parameters_;
  std::vector<torch::Tensor> gradients_;
};

/// Measures the stages of a chain one after another.
class StageMeter {
 public:
  /// `layouts` are the layouts of the gradients of each stage's outputs, as
  /// returned by layouts() of an earlier pass. If empty, gradients have the
  /// layout of the outputs.
  StageMeter(const Chain& chain, const Tensors& inputs,
             const StageCostOptions& options, std::vector<Layout> layouts)
      : chain_(chain),
        options_(options),
        layouts_(std::move(layouts)),
        device_(inputs.at(0).device()),
        spinner_(device_),
        state_(chain.parameters()),
        current_(inputs) {
    for (const auto& buffer : chain.buffers()) state_.push_back(buffer);
    for (const auto& input : inputs) {
      requires_grad_.push_back(input.defined() && input.requires_grad());
    }
  }

  ChainCosts run() {
    ChainCosts chain_costs;
    chain_costs.input_bytes = Storages(current_).bytes();
    const GradientsSetAside aside(chain_.parameters());
    for (int i = 0; i < chain_.size(); ++i) {
      chain_costs.stages.push_back(measure(chain_[i]));
    }
    add_gradients(chain_costs);
    return chain_costs;
  }

  /// Returns the layouts of the gradients that each stage's backward returned.
  std::vector<Layout> layouts() const {
    std::vector<Layout> layouts;
    for (size_t i = 1; i < gradients_.size(); ++i) {
      Layout layout;
      for (const auto& buffer : gradients_[i]) layout.push_back(buffer.strides);
      layouts.push_back(std::move(layout));
    }
    return layouts;
  }

  /// Returns whether these are the layouts that the stages were measured with.
  bool layouts_as_expected() const {
    return std::all_of(
        gradients_.begin(), gradients_.end(), [](const auto& list) {
          return std::all_of(list.begin(), list.end(),
                             [](const auto& b) { return b.as_expected; });
        });
  }

 private:
  /// Returns the strides that the gradient of tensor `i` of a boundary is
  /// measured with.
  Strides expected_strides(size_t boundary, size_t i) const {
    if (boundary >= layouts_.size()) return {};
    return layouts_[boundary].at(i);
  }

  StageCosts measure(const Stage& stage) {
    StageCosts costs;
    const RecomputeContext context(current_, stage.modules());
    Measured* known = nullptr;
    if (!stage.kind().empty()) known = &measured_[key_of(stage)];
    if (known != nullptr && known->times == kMeasuredPerKind) {
      costs = known->costs;
      gradients_.push_back(known->gradients);
      advance(stage, context, costs);
      return costs;
    }
    measure_kept(stage, 0, context, costs);
    const auto variants = static_cast<int>(stage.variants().size());
    for (int v = 1; v <= variants; ++v) {
      StageCosts other;
      measure_kept(stage, v, context, other);
      costs.variants.push_back(
          std::move(other));  // keeps the KeptRunCosts only
    }
    costs.context_bytes = context.buffer_bytes();
    if (known != nullptr) {
      known->costs = costs;
      known->gradients = gradients_.back();
      ++known->times;
    }
    advance(stage, context, costs);
    return costs;
  }

  /// Returns a key that is equal for stages with equal costs.
  std::string key_of(const Stage& stage) const {
    std::ostringstream key;
    key << stage.kind() << ' ' << stage.variants().size();
    const auto add = [&key](const torch::Tensor& tensor, bool requires_grad) {
      if (!tensor.defined()) {
        key << " none";
        return;
      }
      key << ' ' << tensor.scalar_type() << tensor.sizes() << tensor.strides()
          << requires_grad;
    };
    for (size_t i = 0; i < current_.size(); ++i) {
      add(current_[i], requires_grad_[i]);
    }
    for (const auto& module : stage.modules()) {
      for (const auto& parameter : module->parameters()) {
        add(parameter, parameter.requires_grad());
      }
    }
    const size_t boundary = gradients_.size();
    if (boundary < layouts_.size()) {
      for (const Strides& strides : layouts_[boundary]) {
        key << " gradient" << at::IntArrayRef(strides);
      }
    }
    return key.str();
  }

  /// Computes the bytes of the gradients of each boundary. Starts at the end of
  /// the chain, because a gradient may be a view of a larger one that a later
  /// stage created (torch::cat's are), or be passed on by it.
  void add_gradients(ChainCosts& chain_costs) const {
    std::vector<int64_t> bytes = gradient_bytes(current_, requires_grad_);
    const auto sum = [&] {
      return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
    };
    chain_costs.output_gradient_bytes = sum();
    for (size_t i = chain_costs.stages.size(); i-- > 0;) {
      std::vector<int64_t> before;
      for (const GradientBuffer& buffer : gradients_[i]) {
        before.push_back(buffer.output < 0
                             ? buffer.bytes
                             : bytes.at(static_cast<size_t>(buffer.output)));
      }
      bytes = std::move(before);
      chain_costs.stages[i].input_gradient_bytes = sum();
    }
  }

  void measure_kept(const Stage& stage, int variant,
                    const RecomputeContext& context, StageCosts& costs) {
    // The first run warms up caches, also for the variants. The next one begins
    // without gradients of the parameters. All others find them allocated.
    if (variant == 0) {
      spin_ms_ = 0;
      record_gradients_ = true;
      run_forward_backward(stage, variant, context, costs);
      record_gradients_ = false;
      spin_ms_ = std::min(times_.last_ms(), kLongestSpinMs);
    }
    for (const auto& module : stage.modules()) {
      for (auto& parameter : module->parameters()) {
        parameter.mutable_grad().reset();
      }
    }
    run_forward_backward(stage, variant, context, costs);
    costs.first_backward_extra_bytes = costs.backward_extra_bytes;
    times_.clear();
    const int64_t asked_before = OutputsUnused::asked();
    repeat(stage, variant, context, costs);
    const bool asked = OutputsUnused::asked() > asked_before;
    costs.forward_ms = median(std::move(times_.forward));
    costs.backward_ms = median(std::move(times_.backward));
    costs.forward_launch_ms = median(std::move(times_.forward_launch));
    costs.backward_launch_ms = median(std::move(times_.backward_launch));
    times_.clear();
    if (!asked || options_.repeats < 2) return;
    const OutputsUnused unused(true);
    repeat(stage, variant, context, costs);
    costs.unused_output_ms =
        std::max(0.0, costs.forward_ms - median(std::move(times_.forward)));
    times_.clear();
  }

  void repeat(const Stage& stage, int variant, const RecomputeContext& context,
              StageCosts& costs) {
    double spent_ms = 0;
    for (int run = 0;
         run < options_.repeats ||
         (run < options_.max_repeats && spent_ms < options_.min_total_ms);
         ++run) {
      run_forward_backward(stage, variant, context, costs);
      spent_ms += times_.last_ms();
      spin_ms_ = std::min(spin_ms_, 2 * times_.last_launch_ms());
    }
  }

  void run_forward_backward(const Stage& stage, int variant,
                            const RecomputeContext& context,
                            StageCosts& costs) {
    const RecomputeGuard guard(context);
    MemoryMeter meter(device_);
    auto policy = std::make_shared<RecordingPolicy>();
    StageGraph graph;
    Tensors outputs;
    spinner_.spin(spin_ms_);
    const int64_t copied_before = RecomputeContext::made_on_thread();
    const compat::Timestamp start(device_);
    {
      const compat::SavedTensorScope scope(policy);
      const CurrentModules modules(stage.modules());
      const HostRuns host;
      outputs = stage.function(variant)(graph.begin(current_, requires_grad_));
      costs.host_bytes = host_bytes(host.list());
    }
    const compat::Timestamp middle(device_);
    graph.end(outputs);
    costs.keep_extra_bytes = meter.peak_bytes() - meter.live_bytes();
    record_buffers(outputs, std::exchange(policy->saved, {}), costs);
    // Copies that checkpoint() made, which the graph holds.
    costs.saved_bytes += RecomputeContext::made_on_thread() - copied_before;

    Tensors gradients;
    // The first run records the gradients of this stage's inputs.
    const size_t boundary = gradients_.size() - (record_gradients_ ? 0 : 1);
    for (size_t i = 0; i < outputs.size(); ++i) {
      const torch::Tensor& output = outputs[i];
      gradients.push_back(output.defined() && output.requires_grad()
                              ? ones_for(output, expected_strides(boundary, i))
                              : torch::Tensor());
    }
    outputs.clear();  // as in an execution, in which only graphs hold them
    const Tensors given = record_gradients_ ? gradients : Tensors{};
    const auto around =
        options_.around_backward ? options_.around_backward() : nullptr;
    meter.restart();
    const compat::Timestamp back(device_);
    const Tensors result =
        graph.backward(std::move(gradients), /*accumulate=*/true);
    if (record_gradients_) record_gradients(given, result);
    times_.add(start, middle, back, compat::Timestamp(device_),
               device_.is_cuda());
    costs.backward_extra_bytes = meter.peak_increase_bytes();
  }

  /// Runs the stage without saving tensors. Its outputs become the inputs of
  /// the next one.
  void advance(const Stage& stage, const RecomputeContext& context,
               StageCosts& costs) {
    const RecomputeGuard guard(context);
    const MemoryMeter meter(device_);
    StageGraph graph;
    Tensors outputs;
    {
      const NoSaveScope no_save;
      const CurrentModules modules(stage.modules());
      outputs = stage(graph.begin(current_, requires_grad_));
    }
    requires_grad_.clear();
    for (auto& output : outputs) {
      requires_grad_.push_back(output.defined() && output.requires_grad());
      if (output.defined()) output = output.detach();
    }
    costs.drop_extra_bytes = meter.peak_bytes() - meter.live_bytes();
    current_ = std::move(outputs);
  }

  void record_buffers(const Tensors& outputs, const Tensors& saved,
                      StageCosts& costs) const {
    const Storages ins(current_);
    const Storages outs(outputs);
    const Storages state(state_);
    const Storages kept(saved);
    costs.outputs.clear();
    for (size_t i = 0; i < outs.size(); ++i) {
      costs.outputs.push_back({outs.bytes()[i], ins.find(outs.key(i))});
    }
    costs.saved_inputs.clear();
    costs.saved_outputs.clear();
    costs.saved_bytes = 0;
    for (size_t i = 0; i < kept.size(); ++i) {
      const void* key = kept.key(i);
      if (state.find(key) >= 0) continue;
      if (ins.find(key) >= 0) {
        costs.saved_inputs.push_back(ins.find(key));
      } else if (outs.find(key) >= 0) {
        costs.saved_outputs.push_back(outs.find(key));
      } else {
        costs.saved_bytes += kept.bytes()[i];
      }
    }
  }

  /// The gradient of one input of a stage.
  struct GradientBuffer {
    // Bytes of its storage; 0 if undefined or shared with another input.
    int64_t bytes = 0;
    int output = -1;  // output whose gradient has the same storage; -1 if none
    Strides strides;
    // Whether it has the layout that the stage before was measured with.
    bool as_expected = true;
  };

  void record_gradients(const Tensors& given, const Tensors& made) {
    std::unordered_set<const void*> seen;
    std::vector<GradientBuffer> list;
    const size_t stage = gradients_.size();
    for (size_t k = 0; k < made.size(); ++k) {
      const torch::Tensor& gradient = made[k];
      GradientBuffer& buffer = list.emplace_back();
      if (!gradient.defined()) continue;
      buffer.strides = gradient.strides().vec();
      if (stage > 0) {
        const Strides before = expected_strides(stage - 1, k);
        buffer.as_expected = has_layout(
            gradient, before.empty()
                          ? torch::empty_like(current_[k]).strides().vec()
                          : before);
      }
      const auto& storage = gradient.storage();
      if (!seen.insert(storage.unsafeGetStorageImpl()).second) continue;
      buffer.bytes = allocated_bytes(static_cast<int64_t>(storage.nbytes()),
                                     gradient.device());
      for (size_t i = 0; i < given.size(); ++i) {
        if (given[i].defined() && given[i].is_alias_of(gradient)) {
          buffer.output = static_cast<int>(i);
        }
      }
    }
    gradients_.push_back(std::move(list));
  }

  static std::vector<int64_t> gradient_bytes(
      const Tensors& tensors, const std::vector<bool>& requires_grad) {
    std::vector<int64_t> bytes;
    for (size_t i = 0; i < tensors.size(); ++i) {
      bytes.push_back(
          requires_grad[i]
              ? allocated_bytes(static_cast<int64_t>(tensors[i].nbytes()),
                                tensors[i].device())
              : 0);
    }
    return bytes;
  }

  const Chain& chain_;
  StageCostOptions options_;
  std::vector<Layout> layouts_;  // of the gradients of each stage's outputs
  torch::Device device_;
  DeviceSpinner spinner_;
  Tensors state_;  // parameters and buffers: never counted
  Tensors current_;
  std::vector<bool> requires_grad_;
  StageTimes times_;
  bool record_gradients_ = false;
  std::vector<std::vector<GradientBuffer>> gradients_;  // by stage
  struct Measured {
    int times = 0;
    StageCosts costs;  // of the last run
    std::vector<GradientBuffer> gradients;
  };
  // Number of stages of one kind to measure. The first one may follow a
  // different stage, but all after the second one are alike.
  static constexpr int kMeasuredPerKind = 2;
  std::map<std::string, Measured> measured_;
  // How long the device is kept busy before a run: until the host has launched it. The first run
  // may take much longer, since it loads kernels.
  double spin_ms_ = 0;
  static constexpr double kLongestSpinMs = 30;
};

}  // namespace

ChainCosts measure_stage_costs(const Chain& chain, const Tensors& inputs,
                               int repeats) {
  StageCostOptions options;
  options.repeats = repeats;
  return measure_stage_costs(chain, inputs, options);
}

ChainCosts measure_stage_costs(const Chain& chain, const Tensors& inputs,
                               const StageCostOptions& options) {
  TORCH_CHECK(torch::GradMode::is_enabled(),
              "[measure_stage_costs] expected grad mode to be on");
  TORCH_CHECK(!inputs.empty() && inputs[0].defined(),
              "[measure_stage_costs] expected at least one input, got none");
  TORCH_CHECK(options.repeats >= 1,
              "[measure_stage_costs] expected at least one repeat, got ",
              options.repeats);
  // A gradient whose layout differs from its tensor's may be copied. Layouts
  // are known only after the next stage's backward has run, so that a second
  // pass may be necessary.
  constexpr int kMaxPasses = 3;
  std::vector<Layout> layouts;
  for (int pass = 1;; ++pass) {
    StageMeter meter(chain, inputs, options, std::move(layouts));
    ChainCosts chain_costs = meter.run();
    if (pass == kMaxPasses || meter.layouts_as_expected()) return chain_costs;
    layouts = meter.layouts();
  }
}

std::vector<int64_t> output_bytes(const Chain& chain, const Tensors& inputs) {
  std::vector<int64_t> bytes;
  const Storages given(inputs);
  Tensors current = inputs;
  for (int i = 0; i < chain.size(); ++i) {
    const RecomputeContext context(current, chain[i].modules());
    const RecomputeGuard guard(context);
    const torch::NoGradGuard no_grad;
    const CurrentModules modules(chain[i].modules());
    current = chain[i](current);
    const Storages made(current);
    bytes.push_back(0);
    for (size_t k = 0; k < made.size(); ++k) {
      if (given.find(made.key(k)) < 0) bytes.back() += made.bytes()[k];
    }
  }
  return bytes;
}

std::vector<int64_t> output_bytes(const ChainCosts& chain_costs) {
  std::vector<int64_t> bytes;
  std::vector<int64_t> held(
      chain_costs.input_bytes.size());  // 0, since the caller holds it
  for (const StageCosts& stage : chain_costs.stages) {
    std::vector<int64_t> next;
    for (const auto& buffer : stage.outputs) {
      next.push_back(buffer.input < 0
                         ? buffer.bytes
                         : held.at(static_cast<size_t>(buffer.input)));
    }
    held = std::move(next);
    bytes.push_back(std::accumulate(held.begin(), held.end(), int64_t{0}));
  }
  return bytes;
}

}  // namespace reprise
