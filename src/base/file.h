#pragma once

#include <cstddef>
#include <string>

namespace reprise {

/// A file that is there whole or not at all. Written beside its place under a
/// temporary name; `commit()` forces it to disk, renames it and forces the
/// directory. Without a commit the destructor removes what was written, and
/// whatever stood at `path` before is untouched.
///
/// Throws c10::Error that names the path and the system's reason (no space,
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

/// The whole file as text. Throws c10::Error where it cannot be read.
std::string read_text(const std::string& path);

}  // namespace reprise
