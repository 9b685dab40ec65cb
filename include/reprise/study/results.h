#pragma once

#include <string>
#include <vector>

/// The results of a study, one JSON object per line of results.jsonl. docs/results.md
/// documents the format.
namespace reprise {

/// Reads the results in `paths`, each the directory of a study or a .jsonl file.
/// Returns the text of each line: studies first, then runs in the order in which they
/// were written. If several runs have the same id, only the last one is returned. An
/// incomplete last line is ignored. Throws c10::Error if a file cannot be read, if a
/// directory has no results.jsonl, or, with the line number, if a line is not a result.
std::vector<std::string> read_results(const std::vector<std::string>& paths);

/// Appends lines to a results.jsonl. A line is written to disk before append() returns.
/// Only one process can have the file open.
class ResultsFile {
 public:
  /// Creates the directory and the file if they are missing, and truncates an
  /// incomplete last line. Throws c10::Error if another process has the file open.
  explicit ResultsFile(const std::string& directory);
  ~ResultsFile();
  ResultsFile(const ResultsFile&) = delete;
  ResultsFile& operator=(const ResultsFile&) = delete;

  const std::string& path() const { return path_; }

  /// Appends one JSON object. `json` must not contain a newline.
  void append(const std::string& json);

 private:
  std::string path_;
  int file_ = -1;
};

}  // namespace reprise
