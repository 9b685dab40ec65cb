#include "base/file.h"

#include "base/input_file.h"
#include "base/throw_error.h"

#include <reprise/base/bytes.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <fcntl.h>
#include <filesystem>
#include <optional>
#include <sys/random.h>
#include <sys/stat.h>
#include <tuple>
#include <unistd.h>
#include <utility>

namespace reprise {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTemporary = ".tmp-";

[[noreturn]] void throw_cannot_write(const std::string& path) {
  detail::throw_error("[file] cannot write {}: {}", path,
                      detail::system_reason());
}

/// The file that a path names after symbolic links, which need not exist.
std::string after_links(const std::string& path) {
  constexpr int kMostLinks = 40;  // as in the kernel
  fs::path target = path;
  std::error_code none;
  for (int i = 0; fs::is_symlink(target, none); ++i) {
    if (i == kMostLinks) {
      errno = ELOOP;
      throw_cannot_write(path);
    }
    target = target.parent_path() / fs::read_symlink(target, none);
  }
  return target.string();
}

/// Permissions of the file that is to be replaced; nullopt if there is none. Throws if it is not a
/// regular file.
std::optional<mode_t> mode_of_replaced(const std::string& path,
                                       const std::string& target) {
  struct stat status {};
  if (lstat(target.c_str(), &status) != 0) return std::nullopt;
  if (S_ISREG(status.st_mode)) return status.st_mode & 0777;
  detail::throw_error(
      "[file] cannot write {}: expected a regular file or a "
      "name that is not in use, it is {}",
      path,
      S_ISDIR(status.st_mode)    ? "a directory"
      : S_ISFIFO(status.st_mode) ? "a named pipe"
      : S_ISSOCK(status.st_mode) ? "a socket"
                                 : "a device");
}

/// Creates a file with a new name beside `path`. Returns the name and the descriptor, which
/// is -1 with errno set if the system refuses.
std::pair<std::string, int> create_beside(const std::string& path) {
  constexpr int kAttempts = 100;
  std::string name;
  int file = -1;
  for (int i = 0; i < kAttempts && file < 0; ++i) {
    uint64_t number = 0;
    if (getrandom(&number, sizeof number, 0) != sizeof number) break;
    name = fmt::format("{}{}{:016x}", path, kTemporary, number);
    file = open(name.c_str(),
                O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (file < 0 && errno != EEXIST) break;
  }
  return {name, file};
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
    : path_(std::move(path)), target_(after_links(path_)) {
  const auto mode = mode_of_replaced(path_, target_);
  std::tie(temporary_, descriptor_) = create_beside(target_);
  if (descriptor_ < 0) throw_cannot_write(path_);
  if (mode && fchmod(descriptor_, *mode) != 0) {
    const int reason = errno;
    discard();
    errno = reason;
    throw_cannot_write(path_);
  }
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) discard();
}

void AtomicFile::discard() {
  close(std::exchange(descriptor_, -1));
  unlink(temporary_.c_str());
}

void AtomicFile::write(const void* bytes, size_t count) {
  if (!write_all(descriptor_, bytes, count)) throw_cannot_write(path_);
}

void AtomicFile::rewrite(uint64_t from, const std::string& text) {
  if (lseek(descriptor_, static_cast<off_t>(from), SEEK_SET) < 0 ||
      !write_all(descriptor_, text.data(), text.size()) ||
      lseek(descriptor_, 0, SEEK_END) < 0) {
    throw_cannot_write(path_);
  }
}

void AtomicFile::commit() {
  if (fsync(descriptor_) != 0) throw_cannot_write(path_);
  mode_of_replaced(path_, target_);  // it may have been created since
  if (rename(temporary_.c_str(), target_.c_str()) != 0) {
    throw_cannot_write(path_);
  }
  close(std::exchange(descriptor_, -1));
  // The rename survives a power failure once the directory is on disk.
  sync_directory(fs::absolute(target_).parent_path().string());
}

bool is_temporary_file(const std::string& name) {
  return name.find(kTemporary) != std::string::npos;
}

void sync_directory(const std::string& path) {
  const int directory = open(path.empty() ? "." : path.c_str(),
                             O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  // Without permission to read it, there is no way to flush it.
  if (directory < 0 && errno == EACCES) return;
  if (directory < 0 || fsync(directory) != 0) {
    const int reason = errno;
    if (directory >= 0) close(directory);
    if (reason == EINVAL || reason == ENOTSUP || reason == EROFS) return;
    detail::throw_error("[file] cannot write the directory {}: {}", path,
                        detail::system_reason(reason));
  }
  close(directory);
}

void make_directories(const std::string& path) {
  std::error_code error;
  const fs::path all = fs::absolute(path, error);
  fs::path made;
  for (const fs::path& name : all) {
    const fs::path parent = made;
    made /= name;
    if (name.empty() || fs::is_directory(made, error)) continue;
    if (mkdir(made.c_str(), 0777) != 0 && errno != EEXIST) {
      detail::throw_error("[file] cannot make the directory {}: {}", path,
                          detail::system_reason());
    }
    if (!fs::is_directory(made, error)) {
      detail::throw_error(
          "[file] cannot make the directory {}: {} is no "
          "directory",
          path, made.string());
    }
    sync_directory(parent.string());
  }
}

std::string read_text(const std::string& path, uint64_t most) {
  const InputFile file(path);
  std::string text;
  // Files that the system makes up have a size of 0, and others may still grow.
  std::array<char, 1 << 16> part;
  size_t got = 0;
  do {
    got = file.read_some(text.size(), part.data(), part.size());
    text.append(part.data(), got);
    if (text.size() > most || file.size() > most) {
      detail::throw_error("[file] cannot read {}: expected at most {}, got {}",
                          path, format_bytes(static_cast<int64_t>(most)),
                          format_bytes(static_cast<int64_t>(
                              std::max<uint64_t>(text.size(), file.size()))));
    }
  } while (got == part.size());
  return text;
}

std::string why_not_created(const std::string& path) {
  const auto [trial, file] = create_beside(path);
  if (file < 0) return detail::system_reason();
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
