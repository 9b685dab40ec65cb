#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace reprise {

/// A regular file that is open for reading. Directories, named pipes and devices, which may
/// have no end, are refused without waiting for them.
///
/// Reads go through the system and not through a mapping, so that a file that becomes shorter
/// while it is open is an error and not a signal. Members may be called from several threads.
///
/// All members throw reprise::Error with the path and the system's reason.
class InputFile {
 public:
  explicit InputFile(std::string path);
  ~InputFile();
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&&) = delete;

  const std::string& path() const { return path_; }
  /// Size when it was opened. 0 for files that the system makes up, such as those of /proc.
  uint64_t size() const { return size_; }

  /// Reads `count` bytes from position `from`, or fewer at the end of the file. Returns their
  /// number.
  size_t read_some(uint64_t from, void* bytes, size_t count) const;
  /// Reads `count` bytes from position `from`; throws if the file ends before.
  void read(uint64_t from, void* bytes, size_t count) const;

  /// The file's descriptor, which the caller closes; this object is then empty.
  int release();

 private:
  std::string path_;
  int descriptor_ = -1;
  uint64_t size_ = 0;
};

/// What a path names, if it is not a regular file: "a directory", "a named pipe". Empty for a
/// regular file and if there is none.
std::string why_not_regular(const std::string& path);

}  // namespace reprise
