#pragma once

#include "base/append_log.h"

#include <algorithm>
#include <cstdint>
#include <string>

namespace reprise::detail {

/// Appends lines of JSON to a file. Tested by
/// tests/train/store/run_directory_test.cpp.
class MetricsLog {
 public:
  /// Opens or creates the file and truncates it to `keep_bytes`: lines after
  /// the state that a run continues from will be written again. If the file is
  /// shorter, its complete lines are kept. Throws reprise::Error if it cannot be
  /// written.
  MetricsLog(const std::string& path, int64_t keep_bytes)
      : log_(path, "metrics") {
    missing_ = std::max<int64_t>(0, keep_bytes - log_.bytes());
    if (missing_ > 0) {
      log_.truncate_incomplete_line();
    } else {
      log_.truncate(keep_bytes);
    }
  }

  /// How much shorter the file was than expected.
  int64_t missing_bytes() const { return missing_; }

  /// Appends `line` and a newline. If the line cannot be written, the file is
  /// unchanged and reprise::Error is thrown.
  void write(const std::string& line) { log_.append(line + "\n"); }

  /// Flushes written lines to disk. Throws reprise::Error if the system fails.
  void sync() { log_.sync(); }

  const std::string& path() const { return log_.path(); }
  /// Length of the file.
  int64_t bytes() const { return log_.bytes(); }

 private:
  AppendLog log_;
  int64_t missing_ = 0;
};

}  // namespace reprise::detail
