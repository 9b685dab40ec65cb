#pragma once

#include "base/append_log.h"

#include <cstdint>
#include <string>

namespace reprise::detail {

/// Appends lines of JSON to a file. Tested by
/// tests/train/store/run_directory_test.cpp.
class MetricsLog {
 public:
  /// Opens or creates the file and truncates it to `keep_bytes`: lines after
  /// the state that a run continues from will be written again. Throws
  /// reprise::Error if the file is shorter or cannot be written.
  MetricsLog(const std::string& path, int64_t keep_bytes)
      : log_(path, "metrics") {
    log_.truncate(keep_bytes);
  }

  /// Appends `line` and a newline. If the line cannot be written, the file is
  /// unchanged and reprise::Error is thrown.
  void write(const std::string& line) { log_.append(line + "\n"); }

  /// Flushes written lines to disk. Errors are ignored: if the disk fails here,
  /// saving the state fails as well.
  void sync() { log_.sync(); }

  /// Length of the file.
  int64_t bytes() const { return log_.bytes(); }

 private:
  AppendLog log_;
};

}  // namespace reprise::detail
