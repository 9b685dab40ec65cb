#pragma once

#include <reprise/models/model.h>

#include <functional>
#include <string>
#include <string_view>

/// Names of models, by which TrainConfig, studies and the command find them. The built-in
/// ones are registered with the same function; register_dataset() is its counterpart for
/// data. Register at the beginning of main(), before a name is used; not thread-safe.
namespace reprise {

/// A model with a name.
struct ModelEntry {
  std::string name;
  std::string description;  ///< one line for --help
  /// What the model takes from the built-in datasets; Task::kOther: nothing, it has
  /// datasets of its own.
  Task task = Task::kOther;
  /// Options of the model with their defaults. Those that are zero, empty or negative do
  /// not apply to it, and giving them is an error.
  ModelOptions defaults{};
  /// Makes the model on the CPU in float32, initialized from LibTorch's default
  /// generator. All options that apply are set. Name, options and task of the result are
  /// filled in.
  std::function<Model(const ModelOptions& options)> make;
  /// Dataset of a training that names none; empty: mnist for images, else random.
  std::string data{};
};

/// Adds a model. Throws c10::Error if the name is taken, empty, or has characters other
/// than letters, digits, '.', '-' and '_', or if it has no function to make it.
void register_model(ModelEntry entry);

/// Returns the entry of a model. Throws c10::Error on an unknown name, and suggests the
/// nearest one.
const ModelEntry& model_entry(std::string_view name);

}  // namespace reprise
