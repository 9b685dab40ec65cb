#pragma once

#include <reprise/recompute/schedule.h>
#include <reprise/recompute/stage.h>

#include <torch/nn/modules/container/sequential.h>

#include <concepts>
#include <memory>
#include <string>
#include <vector>

namespace reprise {

/// A model as a sequence of stages. The outputs of each stage are the inputs of
/// the next one. A chain is immutable, and copies share the stages. It may be
/// run by several threads at once if its modules may.
///
///     Chain chain(sequential);                        // one stage per module
///     chain = Chain::of(embed, block, head);          // modules or callables
///     chain = Chain({make_stage("a", f), make_stage("b", g)});  // named stages
class Chain {
 public:
  /// Throws c10::Error if `stages` is empty.
  explicit Chain(std::vector<Stage> stages);

  /// Creates one stage per module, named as in the Sequential.
  template <std::same_as<torch::nn::Sequential> S>  // excludes braced lists
  explicit Chain(const S& modules) : Chain(stages_of(modules)) {}

  /// Creates stages from modules and callables, as make_stage() does, and names
  /// them by their position: "0", "1", …
  template <class... F>
  static Chain of(F... functions) {
    std::vector<Stage> stages;
    (stages.push_back(make_stage(std::to_string(stages.size()), functions)),
     ...);
    return Chain(std::move(stages));
  }

  /// Number of stages.
  int size() const { return static_cast<int>(stages_->size()); }
  /// Throws std::out_of_range if there is no stage `i`.
  const Stage& operator[](int i) const {
    return stages_->at(static_cast<size_t>(i));
  }

  /// Return the parameters and buffers of the modules of all stages. Tensors
  /// that stages share are listed once.
  std::vector<torch::Tensor> parameters() const;
  std::vector<torch::Tensor> buffers() const;

  /// Switch every module to training or evaluation mode.
  void train(bool on = true) const;
  void eval() const { train(false); }

  /// Runs the chain by `schedule` as part of the caller's autograd graph.
  /// Outputs can be used by further layers, and their backward runs the rest of
  /// the schedule. `backward()` adds the parameters' gradients to `.grad`;
  /// `torch::autograd::grad` returns gradients of `inputs` only. The backward
  /// can run once and cannot be differentiated. Throws c10::Error if `schedule`
  /// is for another number of stages.
  ///
  /// If grad mode is off, the stages run one after another and `schedule` is
  /// ignored.
  Tensors forward(const Tensors& inputs, const Schedule& schedule) const;

  /// Overload for chains that map one tensor to one tensor.
  torch::Tensor forward(const torch::Tensor& input,
                        const Schedule& schedule) const;

 private:
  static std::vector<Stage> stages_of(const torch::nn::Sequential& modules);
  std::shared_ptr<const std::vector<Stage>> stages_;
};

}  // namespace reprise
