#pragma once

#include <cstddef>
#include <cstdint>
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
/// A symbolic link stays, and the file that it names is replaced; so do the permissions of a
/// replaced file. The name of the temporary file cannot be predicted.
///
/// All members throw reprise::Error with the path and the system's reason (disk full,
/// read-only, no such directory), or if `path` is a directory, a device or a named pipe.
class AtomicFile {
 public:
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* bytes, size_t count);
  void write(const std::string& text) { write(text.data(), text.size()); }
  /// Replaces bytes that have been written, from position `from`.
  void rewrite(uint64_t from, const std::string& text);
  void commit();

 private:
  void discard();

  std::string path_;    // as it was given, for messages
  std::string target_;  // after symbolic links
  std::string temporary_;
  int descriptor_ = -1;
};

/// Whether `name` is that of a temporary file of AtomicFile, which a killed process has left.
bool is_temporary_file(const std::string& name);

/// Flushes the entries of a directory to disk: files that were created, renamed or removed.
/// Does nothing on file systems that cannot. Throws reprise::Error.
void sync_directory(const std::string& path);

/// Creates a directory and those above it that are missing, and flushes their entries to
/// disk. Throws reprise::Error.
void make_directories(const std::string& path);

/// Returns why the file `path` cannot be created or replaced, as the system says it;
/// empty if it can. Creates and removes a temporary file beside it.
std::string why_not_created(const std::string& path);

/// Returns why nothing can be written in the directory `path`, which need not exist yet;
/// empty if it can: "cannot make the directory a/b: a is no directory".
std::string why_directory_unwritable(const std::string& path);

/// Most bytes of a file that is read as a whole, such as a configuration or a study.
constexpr uint64_t kMostTextBytes = uint64_t{64} << 20;

/// Returns the contents of a regular file. Throws reprise::Error if it cannot be read, is no
/// regular file, or has more than `most` bytes.
std::string read_text(const std::string& path, uint64_t most = kMostTextBytes);

}  // namespace reprise
