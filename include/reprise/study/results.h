#pragma once

#include <string>
#include <vector>

/// results.jsonl: what a study has found so far, a JSON object a line, as
/// docs/results.md describes it.
namespace reprise {

/// All objects in the results of `paths` (a study's directory, or a .jsonl file),
/// each as the text of its line: studies first, then runs in the order in which
/// they were written; of runs with one id the last. A torn last line is left
/// out. Throws c10::Error if a file cannot be read, if a directory has no results.jsonl,
/// and if a line is no result, with its number. An empty file has no objects.
std::vector<std::string> read_results(const std::vector<std::string>& paths);

/// Appends to one results.jsonl, a whole line at a time, each on the disk before
/// append() returns. One process at a time: a second one is refused.
class ResultsFile {
 public:
  /// Creates the directory and the file where they are missing; cuts off a torn
  /// last line. Throws c10::Error where another process has it open.
  explicit ResultsFile(const std::string& directory);
  ~ResultsFile();
  ResultsFile(const ResultsFile&) = delete;
  ResultsFile& operator=(const ResultsFile&) = delete;

  const std::string& path() const { return path_; }

  /// `json`: one object, without a newline.
  void append(const std::string& json);

 private:
  std::string path_;
  int file_ = -1;
};

}  // namespace reprise
