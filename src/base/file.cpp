#include "base/file.h"

#include "base/throw_error.h"

#include <fmt/format.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <unistd.h>
#include <utility>

namespace reprise {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void throw_cannot_write(const std::string& path) {
  detail::throw_error("[file] cannot write {}: {}", path,
                      detail::system_reason());
}

}  // namespace

bool write_all(int file, const void* bytes, size_t count) {
  const char* next = static_cast<const char*>(bytes);
  while (count > 0) {
    const ssize_t written = ::write(file, next, count);
    if (written < 0 && errno == EINTR) continue;
    if (written == 0) errno = EIO;
    if (written <= 0) return false;
    next += written;
    count -= static_cast<size_t>(written);
  }
  return true;
}

AtomicFile::AtomicFile(std::string path)
    : path_(std::move(path)),
      temporary_(path_ + ".tmp." + std::to_string(getpid())) {
  descriptor_ =
      open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (descriptor_ < 0) throw_cannot_write(path_);
}

AtomicFile::~AtomicFile() {
  if (descriptor_ < 0) return;
  close(descriptor_);
  unlink(temporary_.c_str());
}

void AtomicFile::write(const void* bytes, size_t count) {
  if (!write_all(descriptor_, bytes, count)) throw_cannot_write(path_);
}

void AtomicFile::commit() {
  if (fsync(descriptor_) != 0) throw_cannot_write(path_);
  if (rename(temporary_.c_str(), path_.c_str()) != 0) throw_cannot_write(path_);
  close(std::exchange(descriptor_, -1));
  // The rename survives a power failure once the directory is on disk.
  const auto folder = std::filesystem::absolute(path_).parent_path();
  const int directory =
      open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory >= 0) {
    fsync(directory);
    close(directory);
  }
}

std::string read_text(const std::string& path) {
  // A std::ifstream would read a directory as an empty file.
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) {
    detail::throw_error("[file] cannot read {}: {}", path,
                        detail::system_reason());
  }
  std::string text;
  std::array<char, 1 << 16> part;
  ssize_t got = 0;
  while ((got = read(file, part.data(), part.size())) > 0 ||
         (got < 0 && errno == EINTR)) {
    if (got > 0) text.append(part.data(), static_cast<size_t>(got));
  }
  const std::string reason = got < 0 ? detail::system_reason() : "";
  close(file);
  if (got < 0) {
    detail::throw_error("[file] cannot read {}: {}", path, reason);
  }
  return text;
}

std::string why_not_created(const std::string& path) {
  const std::string trial = fmt::format("{}.tmp.{}", path, getpid());
  const int file =
      open(trial.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0) return std::strerror(errno);
  close(file);
  unlink(trial.c_str());
  return "";
}

std::string why_directory_unwritable(const std::string& path) {
  std::error_code error;
  fs::path there = fs::absolute(path, error);
  while (!fs::exists(there, error) && there.has_parent_path() &&
         there != there.parent_path()) {
    there = there.parent_path();
  }
  if (!fs::is_directory(there, error)) {
    return fmt::format("cannot make the directory {}: {} is no directory", path,
                       there.string());
  }
  const std::string why = why_not_created((there / ".reprise").string());
  return why.empty() ? ""
                     : fmt::format("cannot write in the directory {}: {}",
                                   there.string(), why);
}

}  // namespace reprise
