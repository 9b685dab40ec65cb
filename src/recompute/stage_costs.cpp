#include "compat/saved_tensors.h"
#include "recompute/gradient_layout.h"
#include "recompute/no_save_scope.h"
#include "recompute/recompute_context.h"
#include "recompute/stage_graph.h"
#include "recompute/stage_times.h"

#include <reprise/memory/meter.h>
#include <reprise/recompute/host_memory.h>
#include <reprise/recompute/stage_costs.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace reprise {
namespace {

using compat::Timestamp;

/// The distinct storages behind a list of tensors, in order.
class Storages {
 public:
  explicit Storages(const Tensors& tensors) {
    for (const auto& tensor : tensors) {
      if (!tensor.defined() || !tensor.has_storage()) continue;
      const void* key = tensor.storage().unsafeGetStorageImpl();
      if (!position_.emplace(key, static_cast<int>(keys_.size())).second) {
        continue;
      }
      keys_.push_back(key);
      bytes_.push_back(allocated_bytes(
          static_cast<int64_t>(tensor.storage().nbytes()), tensor.device()));
    }
  }

  size_t size() const { return keys_.size(); }
  const void* key(size_t i) const { return keys_[i]; }
  const std::vector<int64_t>& bytes() const { return bytes_; }

  /// Its position; -1: not among them.
  int find(const void* key) const {
    const auto found = position_.find(key);
    return found == position_.end() ? -1 : found->second;
  }

 private:
  std::unordered_map<const void*, int> position_;
  std::vector<const void*> keys_;
  std::vector<int64_t> bytes_;
};

/// Notes what autograd saves; saves it as usual.
class NotingPolicy final : public compat::SavedTensorPolicy {
 public:
  std::unique_ptr<compat::SavedTensorHooks> make_hooks() override {
    return std::make_unique<Hooks>(*this);
  }
  Tensors saved;  // while the stage runs; keeps the storages apart

 private:
  struct Hooks final : compat::SavedTensorHooks {
    explicit Hooks(NotingPolicy& policy) : policy(&policy) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      value = tensor.detach();
      policy->saved.push_back(value);
    }
    at::Tensor call_unpack_hook() override { return value; }
    NotingPolicy* policy;
    torch::Tensor value;
  };
};

/// Takes the parameters' gradients away and puts them back at the end.
class GradientsAside {
 public:
  explicit GradientsAside(std::vector<torch::Tensor> parameters)
      : parameters_(std::move(parameters)) {
    for (auto& parameter : parameters_) {
      gradients_.push_back(std::exchange(parameter.mutable_grad(), {}));
    }
  }
  ~GradientsAside() {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      parameters_[i].mutable_grad() = gradients_[i];
    }
  }
  GradientsAside(const GradientsAside&) = delete;
  GradientsAside& operator=(const GradientsAside&) = delete;

 private:
  std::vector<torch::Tensor> parameters_;
  std::vector<torch::Tensor> gradients_;
};

class Tracer {
 public:
  /// `layouts`: what gradients come in to each stage's outputs, as layouts() of an earlier
  /// run has it; empty: they lie as the outputs do.
  Tracer(const Chain& chain, const Tensors& inputs,
         const StageCostOptions& options, std::vector<Layout> layouts)
      : chain_(chain),
        options_(options),
        layouts_(std::move(layouts)),
        device_(inputs.at(0).device()),
        filler_(device_),
        state_(chain.parameters()),
        current_(inputs) {
    for (const auto& buffer : chain.buffers()) state_.push_back(buffer);
    for (const auto& input : inputs) {
      requires_grad_.push_back(input.defined() && input.requires_grad());
    }
  }

  ChainCosts run() {
    ChainCosts figures;
    figures.input_bytes = Storages(current_).bytes();
    const GradientsAside aside(chain_.parameters());
    for (int i = 0; i < chain_.size(); ++i) {
      figures.stages.push_back(measure(chain_[i]));
    }
    add_gradients(figures);
    return figures;
  }

  /// How the gradients lay that each stage's backward made for the one before it.
  std::vector<Layout> layouts() const {
    std::vector<Layout> layouts;
    for (size_t i = 1; i < gradients_.size(); ++i) {
      Layout layout;
      for (const auto& buffer : gradients_[i]) layout.push_back(buffer.strides);
      layouts.push_back(std::move(layout));
    }
    return layouts;
  }

  /// Whether all lay as the stages before them had been measured with.
  bool lay_as_supposed() const {
    return std::all_of(
        gradients_.begin(), gradients_.end(), [](const auto& list) {
          return std::all_of(list.begin(), list.end(),
                             [](const auto& b) { return b.as_supposed; });
        });
  }

 private:
  /// Of the gradient of output `i` of the stage that is measured.
  Strides supposed(size_t boundary, size_t i) const {
    if (boundary >= layouts_.size()) return {};
    return layouts_[boundary].at(i);
  }

  StageCosts measure(const Stage& stage) {
    StageCosts figures;
    const RecomputeContext context(current_, stage.modules());
    Measured* known = nullptr;
    if (!stage.kind().empty()) known = &measured_[key_of(stage)];
    if (known != nullptr && known->times == kEnoughOfAKind) {
      figures = known->figures;
      gradients_.push_back(known->gradients);
      move_on(stage, context, figures);
      return figures;
    }
    measure_kept(stage, 0, context, figures);
    const auto variants = static_cast<int>(stage.variants().size());
    for (int v = 1; v <= variants; ++v) {
      StageCosts other;
      measure_kept(stage, v, context, other);
      figures.variants.push_back(std::move(other));  // what concerns a kept run
    }
    figures.context_bytes = context.buffer_bytes();
    if (known != nullptr) {
      known->figures = figures;
      known->gradients = gradients_.back();
      ++known->times;
    }
    move_on(stage, context, figures);
    return figures;
  }

  /// Equal for stages that cost the same.
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

  /// What the gradients of each boundary take while they are in flight. From the
  /// end, since a gradient may be a view of a larger one that a later stage made
  /// (torch::cat's are), or be handed on from there.
  void add_gradients(ChainCosts& figures) const {
    std::vector<int64_t> bytes = gradient_bytes(current_, requires_grad_);
    const auto sum = [&] {
      return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
    };
    figures.output_gradient_bytes = sum();
    for (size_t i = figures.stages.size(); i-- > 0;) {
      std::vector<int64_t> before;
      for (const GradientBuffer& buffer : gradients_[i]) {
        before.push_back(buffer.output < 0
                             ? buffer.bytes
                             : bytes.at(static_cast<size_t>(buffer.output)));
      }
      bytes = std::move(before);
      figures.stages[i].input_gradient_bytes = sum();
    }
  }

  void measure_kept(const Stage& stage, int variant,
                    const RecomputeContext& context, StageCosts& figures) {
    // The first round warms caches up, for the variants too; the next begins
    // without gradients of the parameters, all others find them there.
    if (variant == 0) {
      fill_ms_ = 0;
      note_gradients_ = true;
      keep_and_go_back(stage, variant, context, figures);
      note_gradients_ = false;
      fill_ms_ = times_.last_ms();
    }
    for (const auto& module : stage.modules()) {
      for (auto& parameter : module->parameters()) {
        parameter.mutable_grad().reset();
      }
    }
    keep_and_go_back(stage, variant, context, figures);
    figures.first_backward_extra_bytes = figures.backward_extra_bytes;
    times_.clear();
    double spent_ms = 0;
    for (int round = 0;
         round < options_.repeats ||
         (round < options_.most_repeats && spent_ms < options_.enough_ms);
         ++round) {
      keep_and_go_back(stage, variant, context, figures);
      spent_ms += times_.last_ms();
      fill_ms_ = std::min(fill_ms_, 2 * times_.last_ms());
    }
    figures.forward_ms = median(std::move(times_.forward));
    figures.backward_ms = median(std::move(times_.backward));
    figures.forward_host_ms = median(std::move(times_.forward_host));
    figures.backward_host_ms = median(std::move(times_.backward_host));
    times_.clear();
  }

  void keep_and_go_back(const Stage& stage, int variant,
                        const RecomputeContext& context, StageCosts& figures) {
    const RecomputeGuard replay(context);
    MemoryMeter meter(device_);
    auto policy = std::make_shared<NotingPolicy>();
    StageGraph graph;
    Tensors outputs;
    filler_.fill(fill_ms_);
    const compat::Timestamp start(device_);
    {
      const compat::SavedTensorScope scope(policy);
      const CurrentModules modules(stage.modules());
      const HostRuns host;
      outputs = stage.function(variant)(graph.begin(current_, requires_grad_));
      figures.host_bytes = host_bytes(host.list());
    }
    const compat::Timestamp middle(device_);
    graph.end(outputs);
    figures.keep_extra_bytes = meter.peak_bytes() - meter.live_bytes();
    note_buffers(outputs, std::exchange(policy->saved, {}), figures);

    Tensors gradients;
    // Those of this stage's inputs are noted in the first round.
    const size_t boundary = gradients_.size() - (note_gradients_ ? 0 : 1);
    for (size_t i = 0; i < outputs.size(); ++i) {
      const torch::Tensor& output = outputs[i];
      gradients.push_back(output.defined() && output.requires_grad()
                              ? ones_for(output, supposed(boundary, i))
                              : torch::Tensor());
    }
    outputs.clear();  // as in an execution, where only graphs hold them
    const Tensors given = note_gradients_ ? gradients : Tensors{};
    const auto around =
        options_.around_backward ? options_.around_backward() : nullptr;
    meter.restart();
    const compat::Timestamp back(device_);
    const Tensors result =
        graph.backward(std::move(gradients), /*accumulate=*/true);
    if (note_gradients_) note_gradients(given, result);
    times_.add(start, middle, back, compat::Timestamp(device_),
               device_.is_cuda());
    figures.backward_extra_bytes = meter.peak_increase_bytes();
  }

  /// Runs the stage without a graph; its outputs are the next one's inputs.
  void move_on(const Stage& stage, const RecomputeContext& context,
               StageCosts& figures) {
    const RecomputeGuard replay(context);
    const MemoryMeter meter(device_);
    StageGraph graph;
    Tensors outputs;
    {
      const NoSaveScope nothing;
      const CurrentModules modules(stage.modules());
      outputs = stage(graph.begin(current_, requires_grad_));
    }
    requires_grad_.clear();
    for (auto& output : outputs) {
      requires_grad_.push_back(output.defined() && output.requires_grad());
      if (output.defined()) output = output.detach();
    }
    figures.drop_extra_bytes = meter.peak_bytes() - meter.live_bytes();
    current_ = std::move(outputs);
  }

  void note_buffers(const Tensors& outputs, const Tensors& saved,
                    StageCosts& figures) const {
    const Storages ins(current_);
    const Storages outs(outputs);
    const Storages state(state_);
    const Storages kept(saved);
    figures.outputs.clear();
    for (size_t i = 0; i < outs.size(); ++i) {
      figures.outputs.push_back({outs.bytes()[i], ins.find(outs.key(i))});
    }
    figures.saved_inputs.clear();
    figures.saved_outputs.clear();
    figures.saved_bytes = 0;
    for (size_t i = 0; i < kept.size(); ++i) {
      const void* key = kept.key(i);
      if (state.find(key) >= 0) continue;
      if (ins.find(key) >= 0) {
        figures.saved_inputs.push_back(ins.find(key));
      } else if (outs.find(key) >= 0) {
        figures.saved_outputs.push_back(outs.find(key));
      } else {
        figures.saved_bytes += kept.bytes()[i];
      }
    }
  }

  /// One for each input of a stage.
  struct GradientBuffer {
    int64_t bytes = 0;  // of its storage; 0: none, or the same as one before
    int output = -1;    // whose gradient's storage it is; -1: one of its own
    Strides strides;
    bool as_supposed = true;  // lies as the stage before was measured with
  };

  void note_gradients(const Tensors& given, const Tensors& made) {
    std::unordered_set<const void*> seen;
    std::vector<GradientBuffer> list;
    const size_t stage = gradients_.size();
    for (size_t k = 0; k < made.size(); ++k) {
      const torch::Tensor& gradient = made[k];
      GradientBuffer& buffer = list.emplace_back();
      if (!gradient.defined()) continue;
      buffer.strides = gradient.strides().vec();
      if (stage > 0) {
        const Strides before = supposed(stage - 1, k);
        buffer.as_supposed = lie_alike(
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
  Filler filler_;
  Tensors state_;  // parameters and buffers: never counted
  Tensors current_;
  std::vector<bool> requires_grad_;
  StageTimes times_;
  bool note_gradients_ = false;
  std::vector<std::vector<GradientBuffer>> gradients_;  // by stage
  struct Measured {
    int times = 0;
    StageCosts figures;  // of the last one
    std::vector<GradientBuffer> gradients;
  };
  // The first of a kind may follow another stage; what comes after a second one is
  // like it.
  static constexpr int kEnoughOfAKind = 2;
  std::map<std::string, Measured> measured_;
  double fill_ms_ = 0;  // how long the device is kept busy before a run
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
              "[trace] expected grad mode to be on");
  TORCH_CHECK(!inputs.empty() && inputs[0].defined(),
              "[trace] expected at least one input, got none");
  TORCH_CHECK(options.repeats >= 1,
              "[trace] expected at least one repeat, got ", options.repeats);
  // A gradient that lies otherwise than its tensor may have to be copied: what that takes
  // is known where the stage behind has run.
  constexpr int kMostPasses = 3;
  std::vector<Layout> layouts;
  for (int pass = 1;; ++pass) {
    Tracer tracer(chain, inputs, options, std::move(layouts));
    ChainCosts figures = tracer.run();
    if (pass == kMostPasses || tracer.lay_as_supposed()) return figures;
    layouts = tracer.layouts();
  }
}

std::vector<int64_t> output_bytes(const Chain& chain, const Tensors& inputs) {
  std::vector<int64_t> bytes;
  const Storages given(inputs);
  Tensors current = inputs;
  for (int i = 0; i < chain.size(); ++i) {
    const RecomputeContext context(current, chain[i].modules());
    const RecomputeGuard replay(context);
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

std::vector<int64_t> output_bytes(const ChainCosts& figures) {
  std::vector<int64_t> bytes;
  std::vector<int64_t> held(figures.input_bytes.size());  // the caller's: 0
  for (const StageCosts& stage : figures.stages) {
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
