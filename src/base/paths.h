#pragma once

#include <string>

namespace reprise {

/// Value of an environment variable; empty if it is not set.
std::string environment_variable(const char* name);

/// ${XDG_CACHE_HOME:-~/.cache}/reprise, which may not exist; empty if neither
/// XDG_CACHE_HOME nor HOME is set.
std::string cache_directory();

/// Path of an executable: `name` itself if it contains a slash, otherwise the first match
/// in PATH. Empty if there is none.
std::string find_program(const std::string& name);

/// A new directory in TMPDIR, or /tmp, that is removed with its contents when the object
/// is destroyed. Its name begins with `prefix`. Throws reprise::Error if it cannot be
/// created.
class TemporaryDirectory {
 public:
  explicit TemporaryDirectory(const std::string& prefix);
  ~TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace reprise
