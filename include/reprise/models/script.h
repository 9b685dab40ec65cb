#pragma once

#include <reprise/models/model.h>
#include <reprise/recompute/stage.h>

#include <torch/nn/module.h>

#include <memory>
#include <string>

namespace torch::jit {
struct Module;
}

namespace reprise {

/// A TorchScript module as a torch::nn::Module, so that it can be a stage of a chain.
///
///     auto block = load_script_module("block.pt");
///     Chain chain({make_stage("block", block), make_stage("head", head)});
///
/// `named_parameters()` and `named_buffers()` have the names that the module has in
/// Python, such as "conv1.weight", and are the tensors of the script itself. Optimizers,
/// `to(device)`, recomputation and weight files therefore work as for native modules.
/// Parameters that are frozen in the script stay frozen. A tensor that the script has
/// under several names is listed under the first one.
///
/// The script is interpreted operation by operation, without the optimizations of
/// TorchScript's profiling executor. That executor compiles other kernels for later calls,
/// so a recomputation would differ from the first run. A script that was optimized before
/// it was wrapped stays so.
///
/// Exceptions thrown inside a script keep their type. This is a setting of the whole
/// process, made when the first module is created: messages lack the position in the
/// script, and contain the name of this module instead.
///
/// As for native modules, several threads may call forward() at once if the script does
/// not update its attributes.
class ScriptModule : public torch::nn::Module {
 public:
  /// Shares the tensors of `module`. `name` is used in errors. Throws c10::Error if the
  /// script has no method `forward`, assigns to a parameter, or contains a
  /// `with torch.autocast` block: the precision of a training decides about autocast.
  explicit ScriptModule(const torch::jit::Module& module,
                        std::string name = "script");

  /// For traced modules, which have no modes: forward() runs `module` in training mode and
  /// `evaluation` in evaluation mode. The tensors of `evaluation` are replaced by those of
  /// `module`. Throws also if their names, shapes or types differ.
  ScriptModule(const torch::jit::Module& module,
               const torch::jit::Module& evaluation,
               std::string name = "script");

  /// Runs the script's `forward` with any number of tensors. Returns the tensors that it
  /// returns: one, or a tuple or a list of them. Throws c10::Error if the script takes
  /// another number of arguments or returns something else.
  Tensors forward(const Tensors& inputs);

  /// Switches the script and all of its submodules to training or evaluation mode.
  void train(bool on = true) override;

  /// Number of arguments that the script's `forward` needs, and the most that it takes.
  int required_inputs() const;
  int most_inputs() const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

/// Loads a file written by torch.jit.save() or torch::jit::Module::save() into host
/// memory. Throws c10::Error if the file is missing or is not TorchScript, and as the
/// constructor of ScriptModule does.
std::shared_ptr<ScriptModule> load_script_module(const std::string& path);

/// Loads a model from a directory written by examples/script/split_model.py: model.json,
/// one TorchScript file per stage, and weights.safetensors.
///
/// Each stage takes as many tensors as model.json states, from the front, and passes the
/// others on behind its outputs. The chain takes the inputs of the model and the targets.
/// Its last stage is the loss, also a script: it returns the sum of the losses, and in
/// evaluation mode may return the number of correct predictions. Without that number, the
/// model counts 0 correct predictions.
///
/// Parameters and buffers have the names of the Python model and the values of
/// weights.safetensors. Tensors that stages share are listed once. The model is in host
/// memory and in training mode; `options` and `task` are not set.
///
/// Throws c10::Error or reprise::Error if a file is missing or damaged, if model.json has
/// another version, or if a script does not match model.json or the weights: number of
/// tensors, names, shapes or types.
Model load_script_model(const std::string& directory);

}  // namespace reprise
