#pragma once

#include <reprise/base/enum_text.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

/// Checks whether the files of a run or a study are whole.
namespace reprise {

enum class CheckedKind {
  kConfig,    ///< config.json
  kMetrics,   ///< metrics.jsonl
  kState,     ///< the file of a state that rank 0 wrote
  kPart,      ///< the part of a state that another rank wrote
  kSummary,   ///< summary.json
  kTensors,   ///< another safetensors file, such as exported weights
  kResults,   ///< results.jsonl of a study
  kSetAside,  ///< a file of a state that was set aside; whole or not
};

template <>
struct EnumText<CheckedKind> {
  static constexpr std::array<std::string_view, 8> names{
      "config",  "metrics", "state",   "part",
      "summary", "tensors", "results", "set-aside"};
};

struct CheckedFile {
  std::string name;  ///< in the directory
  CheckedKind kind = CheckedKind::kState;
  int64_t bytes = 0;
  bool checksums =
      false;  ///< it has some, and fits them unless there is a problem
  std::string problem{};  ///< why it is not whole; empty: it is
};

struct CheckResult {
  std::string directory;
  std::vector<CheckedFile> files;
  std::string newest{};  ///< the newest whole state; empty: none

  /// Whether all files are whole, apart from those that were set aside.
  bool whole() const;
};

/// Reads all files of a run or of a study. A state is whole if all its files are there, belong
/// together and fit their checksums. With `repair`, those that are not are renamed to
/// *.broken, so that the newest whole state is the next one to be resumed from; the result
/// is that after the repair.
///
/// Throws c10::Error if the directory has neither a run nor results, or, with `repair`, if
/// another process is training in it; reprise::Error if the system refuses to read or rename.
CheckResult check_run(const std::string& directory, bool repair = false);

std::string to_json(const CheckResult& result);
std::string to_table(const CheckResult& result);

}  // namespace reprise
