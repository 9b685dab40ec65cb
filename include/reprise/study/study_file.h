#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// A study is a set of trainings described by a YAML file:
///
///     title: Memory and time of a small CNN
///     views: [grid]
///     shared: {data: mnist, seconds: 2}
///     runs:
///       - model: cnn-basic
///         image-size: [112, 224]
///         batch: [4, 8, 16]
///         accumulate: [1, 2, 4]
///         recompute: [none, sqrt]
///         at-most:
///           - {of: [batch, accumulate], limit: 16}
///
/// Every block of `runs` expands to the Cartesian product of its lists. Keys are the
/// flags of `reprise train`. docs/studies.md documents the format.
namespace reprise {

struct StudyRun {
  /// Flags without dashes, and their values, in the order of the file.
  std::vector<std::pair<std::string, std::string>> values;
  std::string label;  ///< human-readable; may be empty
  int repeat = 1;     ///< number of the repeat, starting at 1

  /// The value of a flag, or "" if it is not set.
  std::string value(std::string_view flag) const;

  /// The values as a JSON object, with underscores instead of dashes in the names.
  std::string case_json() const;

  /// Identifier that depends on the values, the repeat, the study and the device, but
  /// not on the order of the values.
  std::string id(const std::string& study, const std::string& device) const;

  /// Human-readable description, such as "cnn-basic, image-size 112, 4 × 2". Omits the
  /// flags in `common`.
  std::string description(const std::vector<std::string>& common = {}) const;
};

struct Study {
  std::string name;
  std::string title;
  std::string question;
  std::vector<std::string> views;
  std::string reference = "null";  ///< published results, as JSON
  std::string text;                ///< content of the file
  double timeout_s = 0;            ///< per run; 0: not set
  /// The runs in execution order: a coarse grid of all axes first, then the values in
  /// between. All first repeats come before the second ones.
  std::vector<StudyRun> runs;
  std::vector<std::string> constant;  ///< flags with the same value in all runs

  /// Sets a flag of all runs. Setting one of steps, epochs and seconds removes the
  /// other two.
  void set(const std::string& flag, const std::string& value);
  /// Keeps only the runs in which `flag` has this value. Throws c10::Error if there are
  /// none.
  void only(const std::string& flag, const std::string& value);
};

/// Parses a study. `flags` are the keys that runs may have. Throws c10::Error with the
/// line number; for an unknown key, the message suggests the nearest known one.
Study read_study(const std::string& text, const std::string& name,
                 const std::vector<std::string>& flags);

/// Name and text of the built-in studies.
const std::vector<std::pair<std::string, std::string>>& shipped_studies();

/// Opens a study by path or by the name of a built-in study. Throws c10::Error if there
/// is no such study.
Study open_study(const std::string& path_or_name,
                 const std::vector<std::string>& flags);

}  // namespace reprise
