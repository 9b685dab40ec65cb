#pragma once

#include <functional>
#include <string>
#include <vector>

/// What is fuzzed: one target for each format that a user can give to the program.
namespace reprise::fuzz {

struct Target {
  std::string name;
  /// Name that an input gets as a file; empty: the input is no file.
  std::string file;
  /// Reads the input, of which nothing is known. `path` is that of its file. Throws
  /// reprise::Error or c10::Error if it is refused; any other exception is a failure.
  std::function<void(const std::string& path, const std::string& input)> run;
  /// Creates other files that `run` needs. Called once for each process and folder.
  std::function<void(const std::string& folder)> prepare = {};
  /// A safetensors file: mutations of the header keep its length right.
  bool has_safetensors_header = false;
  /// Part of the path that messages must have; empty: messages of text have none.
  std::string named = file;
  std::string corpus = name;  ///< folder of inputs that are mutated
};

std::vector<Target> tensor_targets();
std::vector<Target> data_targets();
std::vector<Target> text_targets();
std::vector<Target> parser_targets();

/// The same value for the same input, to choose among ways to use it.
inline size_t choice_of(const std::string& input, size_t choices) {
  return std::hash<std::string>()(input) % choices;
}

/// A message that is not thrown, such as a warning. The driver checks it like an exception's.
void report_refusal(const std::string& message);

}  // namespace reprise::fuzz
