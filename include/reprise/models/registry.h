#pragma once

#include <reprise/models/model.h>

#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

/// Names of models, by which TrainConfig, studies and the command find them. The built-in
/// ones are registered with the same function; register_dataset() is its counterpart for
/// data. Register at the beginning of main(), before a name is used; not thread-safe.
namespace reprise {

/// An option that ModelOptions has no member for. It is a flag of the command, a key of
/// studies and a part of config.json.
struct OwnOption {
  /// Flag without dashes: lower-case letters, digits and '-', beginning with a letter.
  /// Models may have options of the same name if their types are the same.
  std::string name;
  std::string help;  ///< noun phrase, without the default
  /// Default, whose type is the type of the option: true, 5, 0.1 or "text".
  OptionValue value;
  /// Range of a number.
  double lowest = -std::numeric_limits<double>::infinity();
  double highest = std::numeric_limits<double>::infinity();
  std::vector<std::string> choices{};  ///< allowed texts; empty: any
};

/// A model with a name.
struct ModelEntry {
  std::string name;
  std::string description{};  ///< one line for --help
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
  /// Options besides those of `defaults`. `make` receives all of them in
  /// ModelOptions::own.
  std::vector<OwnOption> own_options{};
};

/// Adds a model. Throws c10::Error if the name is taken, empty, or has characters other
/// than letters, digits, '.', '-' and '_', if it has no function to make it, or if an option
/// has a wrong name or default, or the name of a member of ModelOptions.
void register_model(ModelEntry entry);

/// Returns the entry of a model. Throws c10::Error on an unknown name, and suggests the
/// nearest one.
const ModelEntry& model_entry(std::string_view name);

/// Returns the options that make_model() makes the model `name` with: `given`, and defaults
/// for those that are not set. Throws c10::Error as make_model() does.
ModelOptions resolve_options(std::string_view name, const ModelOptions& given);

}  // namespace reprise
