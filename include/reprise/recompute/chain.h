#pragma once

#include <reprise/recompute/schedule.h>
#include <reprise/recompute/stage.h>

#include <torch/nn/modules/container/sequential.h>

#include <concepts>
#include <memory>
#include <string>
#include <vector>

namespace reprise {

/// A model as a list of stages, each fed with what the one before returned.
/// Copies share the stages; a chain never changes after it is made. It may be
/// run from several threads wherever its modules may.
///
///     Chain chain(sequential);                      // a stage a module
///     Chain chain = Chain::of(embed, block, head);  // modules or callables
///     Chain chain({make_stage("a", f), Stage(...)}); // by name
class Chain {
 public:
  /// Throws c10::Error where `stages` is empty.
  explicit Chain(std::vector<Stage> stages);

  /// A stage a module, named as in the Sequential.
  template <std::same_as<torch::nn::Sequential> S>  // not for a list in braces
  explicit Chain(const S& modules) : Chain(stages_of(modules)) {}

  /// From modules and callables, as for make_stage(); named by position.
  template <class... F>
  static Chain of(F... functions) {
    std::vector<Stage> stages;
    (stages.push_back(make_stage(std::to_string(stages.size()), functions)),
     ...);
    return Chain(std::move(stages));
  }

  int size() const { return static_cast<int>(stages_->size()); }
  const Stage& operator[](int i) const {
    return stages_->at(static_cast<size_t>(i));
  }

  /// Of all modules of all stages; those that stages share are there once.
  std::vector<torch::Tensor> parameters() const;
  std::vector<torch::Tensor> buffers() const;

  /// Switches every module to training or evaluation.
  void train(bool on = true) const;
  void eval() const { train(false); }

  /// Runs the chain by `schedule` inside the caller's autograd graph: outputs
  /// can be used by further layers, and their backward runs the rest of the
  /// schedule. Gradients of parameters are added to their `.grad` by
  /// `backward()`; `torch::autograd::grad` gives those of `inputs` only. The
  /// backward can run once, and not be differentiated again.
  ///
  /// Without grad mode the stages simply run one after another.
  Tensors forward(const Tensors& inputs, const Schedule& schedule) const;

  /// For chains from one tensor to one tensor.
  torch::Tensor forward(const torch::Tensor& input,
                        const Schedule& schedule) const;

 private:
  static std::vector<Stage> stages_of(const torch::nn::Sequential& modules);
  std::shared_ptr<const std::vector<Stage>> stages_;
};

}  // namespace reprise
