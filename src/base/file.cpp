#include "base/file.h"

#include <c10/util/Exception.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

namespace reprise {
namespace {

std::string reason() {
  return std::strerror(errno);
}

}  // namespace

AtomicFile::AtomicFile(std::string path)
    : path_(std::move(path)),
      temporary_(path_ + ".tmp." + std::to_string(getpid())) {
  descriptor_ =
      open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  TORCH_CHECK(descriptor_ >= 0, "[file] cannot write ", path_, ": ", reason());
}

AtomicFile::~AtomicFile() {
  if (descriptor_ < 0) return;
  close(descriptor_);
  unlink(temporary_.c_str());
}

void AtomicFile::write(const void* bytes, size_t count) {
  const char* at = static_cast<const char*>(bytes);
  while (count > 0) {
    const ssize_t written = ::write(descriptor_, at, count);
    if (written < 0 && errno == EINTR) continue;
    TORCH_CHECK(written > 0, "[file] cannot write ", path_, ": ", reason());
    at += written;
    count -= static_cast<size_t>(written);
  }
}

void AtomicFile::commit() {
  TORCH_CHECK(fsync(descriptor_) == 0, "[file] cannot write ", path_, ": ",
              reason());
  TORCH_CHECK(rename(temporary_.c_str(), path_.c_str()) == 0,
              "[file] cannot write ", path_, ": ", reason());
  close(std::exchange(descriptor_, -1));
  // The rename itself survives a power failure once the directory is on disk.
  const auto folder = std::filesystem::absolute(path_).parent_path();
  const int directory =
      open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory >= 0) {
    fsync(directory);
    close(directory);
  }
}

std::string read_text(const std::string& path) {
  // A stream would take a directory for an empty file.
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  TORCH_CHECK(file >= 0, "[file] cannot read ", path, ": ", reason());
  std::string text;
  std::array<char, 1 << 16> part;
  ssize_t got = 0;
  while ((got = read(file, part.data(), part.size())) > 0 ||
         (got < 0 && errno == EINTR)) {
    if (got > 0) text.append(part.data(), static_cast<size_t>(got));
  }
  const std::string why = got < 0 ? reason() : "";
  close(file);
  TORCH_CHECK(got == 0, "[file] cannot read ", path, ": ", why);
  return text;
}

}  // namespace reprise
