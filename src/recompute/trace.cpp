#include "saved_nothing.h"
#include "stage_graph.h"

#include <reprise/memory/meter.h>
#include <reprise/recompute/replay.h>
#include <reprise/recompute/trace.h>
#include <reprise/torch/cuda.h>
#include <reprise/torch/saved_tensors.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <unordered_map>
#include <utility>

namespace reprise {
namespace {

using Clock = std::chrono::steady_clock;

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
      bytes_.push_back(static_cast<int64_t>(tensor.storage().nbytes()));
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

double median(std::vector<double> values) {
  const auto middle =
      values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

class Tracer {
 public:
  Tracer(const Chain& chain, const Tensors& inputs, int repeats)
      : chain_(chain),
        repeats_(repeats),
        device_(inputs.at(0).device()),
        state_(chain.parameters()),
        current_(inputs) {
    for (const auto& buffer : chain.buffers()) state_.push_back(buffer);
    for (const auto& input : inputs) {
      requires_grad_.push_back(input.defined() && input.requires_grad());
    }
  }

  ChainFigures run() {
    ChainFigures figures;
    figures.input_bytes = Storages(current_).bytes();
    const GradientsAside aside(chain_.parameters());
    for (int i = 0; i < chain_.size(); ++i) {
      figures.stages.push_back(measure(chain_[i]));
    }
    figures.output_gradient_bytes = gradient_bytes(current_, requires_grad_);
    return figures;
  }

 private:
  StageFigures measure(const Stage& stage) {
    StageFigures figures;
    const ForwardContext context(current_, stage.modules());
    std::vector<double> forward_ms;
    std::vector<double> backward_ms;
    // The first round makes the parameters' gradients and warms caches up.
    for (int round = 0; round <= repeats_; ++round) {
      keep_and_go_back(stage, context, figures);
      forward_ms.push_back(forward_ms_);
      backward_ms.push_back(backward_ms_);
    }
    forward_ms.erase(forward_ms.begin());
    backward_ms.erase(backward_ms.begin());
    figures.forward_ms = median(std::move(forward_ms));
    figures.backward_ms = median(std::move(backward_ms));
    figures.input_gradient_bytes = gradient_bytes(current_, requires_grad_);
    move_on(stage, context, figures);
    return figures;
  }

  void keep_and_go_back(const Stage& stage, const ForwardContext& context,
                        StageFigures& figures) {
    const ReplayGuard replay(context);
    MemoryMeter meter(device_);
    auto policy = std::make_shared<NotingPolicy>();
    StageGraph graph;
    Tensors outputs;
    const auto start = now();
    {
      const compat::SavedTensorScope scope(policy);
      const CurrentModules modules(stage.modules());
      outputs = stage(graph.begin(current_, requires_grad_));
    }
    forward_ms_ = milliseconds_since(start);
    graph.end(outputs);
    figures.keep_extra_bytes = meter.peak_bytes() - meter.live_bytes();
    note_buffers(outputs, std::exchange(policy->saved, {}), figures);

    Tensors gradients;
    for (const auto& output : outputs) {
      gradients.push_back(output.defined() && output.requires_grad()
                              ? torch::ones_like(output)
                              : torch::Tensor());
    }
    outputs.clear();  // as in an execution, where only graphs hold them
    meter.restart();
    const auto back = now();
    graph.backward(std::move(gradients), /*accumulate=*/true);
    backward_ms_ = milliseconds_since(back);
    figures.backward_extra_bytes = meter.peak_increase_bytes();
  }

  /// Runs the stage without a graph; its outputs are the next one's inputs.
  void move_on(const Stage& stage, const ForwardContext& context,
               StageFigures& figures) {
    const ReplayGuard replay(context);
    const MemoryMeter meter(device_);
    StageGraph graph;
    Tensors outputs;
    {
      const SavedNothing nothing;
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
                    StageFigures& figures) const {
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

  static int64_t gradient_bytes(const Tensors& tensors,
                                const std::vector<bool>& requires_grad) {
    int64_t bytes = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (requires_grad[i]) bytes += static_cast<int64_t>(tensors[i].nbytes());
    }
    return bytes;
  }

  Clock::time_point now() const {
    if (device_.is_cuda()) compat::cuda_synchronize(device_.index());
    return Clock::now();
  }

  double milliseconds_since(Clock::time_point start) const {
    return std::chrono::duration<double, std::milli>(now() - start).count();
  }

  const Chain& chain_;
  int repeats_;
  torch::Device device_;
  Tensors state_;  // parameters and buffers: never counted
  Tensors current_;
  std::vector<bool> requires_grad_;
  double forward_ms_ = 0;
  double backward_ms_ = 0;
};

}  // namespace

ChainFigures trace(const Chain& chain, const Tensors& inputs, int repeats) {
  TORCH_CHECK(torch::GradMode::is_enabled(),
              "[trace] expected grad mode to be on");
  TORCH_CHECK(!inputs.empty() && inputs[0].defined(),
              "[trace] expected at least one input, got none");
  TORCH_CHECK(repeats >= 1, "[trace] expected at least one repeat, got ",
              repeats);
  return Tracer(chain, inputs, repeats).run();
}

}  // namespace reprise
