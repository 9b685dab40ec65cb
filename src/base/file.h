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

/// Returns why the file `path` cannot be created or replaced, as the system says it;
/// empty if it can. Creates and removes a temporary file beside it.
std::string why_not_created(const std::string& path);

/// Returns why nothing can be written in the directory `path`, which need not exist yet;
/// empty if it can: "cannot make the directory a/b: a is no directory".
std::string why_directory_unwritable(const std::string& path);

/// Returns the contents of a file. Throws reprise::Error if it cannot be read.
std::string read_text(const std::string& path);

}  // namespace reprise
