#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace reprise::detail {

/// An append-only file of records. Each append writes a whole record or, if it fails,
/// none of it: the file is truncated to the end of the last complete record. One writer
/// at a time; the caller ensures that, for example with try_lock().
///
/// Errors are thrown as reprise::Error that begins with "[`owner`] ".
class AppendLog {
 public:
  enum class Mode {
    kOpenOrCreate,
    kCreateNew,  ///< fails if the file exists
  };

  /// New records are appended to what the file holds.
  AppendLog(std::string path, std::string owner,
            Mode mode = Mode::kOpenOrCreate);
  ~AppendLog();
  AppendLog(const AppendLog&) = delete;
  AppendLog& operator=(const AppendLog&) = delete;

  /// Takes an exclusive lock that is released when the file is closed or the process
  /// dies. Returns false if another open file has it.
  bool try_lock();

  /// Removes everything after the first `bytes` bytes. Throws if the file is shorter.
  void truncate(int64_t bytes);

  /// Removes everything after the last newline, such as a line that a killed process
  /// did not complete.
  void truncate_incomplete_line();

  /// Appends one record, which includes its newline if the file is made of lines.
  void append(std::string_view record);

  /// Flushes the file to disk, and at first its entry in the directory. Throws if the system
  /// fails.
  void sync();

  const std::string& path() const { return path_; }
  /// Length of the complete records.
  int64_t bytes() const { return bytes_; }

 private:
  [[noreturn]] void throw_cannot_write(int reason) const;
  int64_t find_end() const;

  std::string path_;
  std::string owner_;
  int file_ = -1;
  int64_t bytes_ = 0;
  bool entry_synced_ = false;
  bool torn_ = false;  // part of a record could not be removed
};

}  // namespace reprise::detail
