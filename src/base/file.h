#pragma once

#include <cstddef>
#include <string>

namespace reprise {

/// Writes all `count` bytes to an open file, resuming after short writes and signals.
/// Returns false with errno set if the system refuses; part of the bytes may then have
/// been written.
bool write_all(int file, const void* bytes, size_t count);

/// A file that is written completely or not at all. The bytes go to a temporary file in
/// the same directory; commit() flushes it to disk, renames it to `path` and flushes the
/// directory. Without a commit the destructor removes the temporary file and leaves
/// `path` unchanged.
///
/// All members throw reprise::Error with the path and the system's reason (disk full,
/// read-only, no such directory).
class AtomicFile {
 public:
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* bytes, size_t count);
  void write(const std::string& text) { write(text.data(), text.size()); }
  void commit();

 private:
  std::string path_;
  std::string temporary_;
  int descriptor_ = -1;
};

/// Returns the contents of a file. Throws reprise::Error if it cannot be read.
std::string read_text(const std::string& path);

}  // namespace reprise
