#pragma once

#include <memory>
#include <string>
#include <vector>

/// results.jsonl holds the results of a study, one JSON object per line, as
/// docs/results.md describes.
namespace reprise {

namespace detail {
class AppendLog;
}

/// Returns all objects in the results of `paths` (study directories or .jsonl files),
/// each as the text of its line: studies first, then runs in the order in which they were
/// written. If runs have the same id, the last one counts. An incomplete last line is
/// ignored. Throws reprise::Error if a file cannot be read, and c10::Error if a path does
/// not exist, a directory has no results.jsonl or a line is not a result (with its
/// number).
std::vector<std::string> read_results(const std::vector<std::string>& paths);

/// Appends lines to a results.jsonl. Each line is on disk before append() returns, or not
/// in the file at all. One process at a time may have the file open.
class ResultsFile {
 public:
  /// Creates the directory and the file if they do not exist, and removes an incomplete
  /// last line. Throws c10::Error if another process has the file open, and
  /// reprise::Error if it cannot be written.
  explicit ResultsFile(const std::string& directory);
  ~ResultsFile();
  ResultsFile(const ResultsFile&) = delete;
  ResultsFile& operator=(const ResultsFile&) = delete;

  const std::string& path() const;

  /// `json`: one object, without a newline. Throws reprise::Error if it cannot be
  /// written.
  void append(const std::string& json);

 private:
  std::unique_ptr<detail::AppendLog> log_;
};

}  // namespace reprise
