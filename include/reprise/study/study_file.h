#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// A study: which trainings to run, as a YAML file says it.
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
/// Every block of `runs` gives the product of its lists. Keys are the flags of
/// `reprise train`. docs/studies.md has all of it.
namespace reprise {

struct StudyRun {
  /// Flags without their dashes and their values, in the file's order.
  std::vector<std::pair<std::string, std::string>> values;
  std::string label;  ///< for people; empty: none
  int repeat = 1;

  /// The value of a flag; empty where it is not set.
  std::string value(std::string_view flag) const;

  /// The values as a JSON object: names with _ for -, numbers as numbers.
  std::string case_json() const;

  /// The same for the same values, repeat, study and device, whatever the order.
  std::string id(const std::string& study, const std::string& device) const;

  /// "cnn-basic, image-size 112, 4 × 2, …": for people, without what `common`
  /// names.
  std::string words(const std::vector<std::string>& common = {}) const;
};

struct Study {
  std::string name;
  std::string title;
  std::string question;
  std::vector<std::string> views;
  std::string reference = "null";  ///< published figures, as JSON
  std::string text;                ///< the file
  double timeout_s = 0;            ///< of one run; 0: none given
  /// In the order to run: a coarse picture of all axes first, then what lies
  /// between; first repeats first.
  std::vector<StudyRun> runs;
  std::vector<std::string> constant;  ///< flags that all runs set alike

  /// Sets a flag of all runs. Of steps, epochs and seconds a run has one alone.
  void set(const std::string& flag, const std::string& value);
  /// Leaves the runs whose flag has this value. Throws c10::Error where none has.
  void only(const std::string& flag, const std::string& value);
};

/// `flags`: the keys that runs may have. Throws c10::Error with the line, and for
/// an unknown key the nearest known one.
Study read_study(const std::string& text, const std::string& name,
                 const std::vector<std::string>& flags);

/// Studies that come with the library: name and text.
const std::vector<std::pair<std::string, std::string>>& shipped_studies();

/// A path, or the name of a shipped study. Throws c10::Error where it is neither.
Study open_study(const std::string& path_or_name,
                 const std::vector<std::string>& flags);

}  // namespace reprise
