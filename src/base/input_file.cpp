#include "base/input_file.h"

#include "base/throw_error.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

namespace reprise {
namespace {

/// Empty for a regular file.
std::string kind_of(mode_t mode) {
  switch (mode & S_IFMT) {
    case S_IFREG:
      return "";
    case S_IFDIR:
      return "a directory";
    case S_IFIFO:
      return "a named pipe";
    case S_IFSOCK:
      return "a socket";
    default:
      return "a device";
  }
}

}  // namespace

InputFile::InputFile(std::string path) : path_(std::move(path)) {
  // O_NONBLOCK prevents waiting for the writer of a named pipe; regular files ignore it.
  descriptor_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct stat status {};
  if (descriptor_ < 0 || fstat(descriptor_, &status) != 0) {
    const int reason = errno;
    if (descriptor_ >= 0) close(descriptor_);
    detail::throw_error("[file] cannot read {}: {}", path_,
                        detail::system_reason(reason));
  }
  const std::string kind = kind_of(status.st_mode);
  if (!kind.empty()) {
    close(descriptor_);
    detail::throw_error("[file] cannot read {}: expected a file, it is {}",
                        path_, kind);
  }
  size_ = static_cast<uint64_t>(status.st_size);
}

InputFile::~InputFile() {
  if (descriptor_ >= 0) close(descriptor_);
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      size_(other.size_) {}

size_t InputFile::read_some(uint64_t from, void* bytes, size_t count) const {
  // The system reads at most 2 GiB in one call.
  constexpr size_t kMost = size_t{1} << 30;
  char* next = static_cast<char*>(bytes);
  size_t done = 0;
  while (done < count) {
    const ssize_t got =
        pread(descriptor_, next + done, std::min(count - done, kMost),
              static_cast<off_t>(from + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      detail::throw_error("[file] cannot read {}: {}", path_,
                          detail::system_reason());
    }
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  return done;
}

void InputFile::read(uint64_t from, void* bytes, size_t count) const {
  const size_t done = read_some(from, bytes, count);
  if (done == count) return;
  struct stat now {};
  const bool known = fstat(descriptor_, &now) == 0 && now.st_size > 0;
  detail::throw_error(
      "[file] cannot read {}: it ends after {} bytes, {} were expected; it "
      "has changed since it was opened",
      path_, known ? static_cast<uint64_t>(now.st_size) : from + done,
      from + count);
}

int InputFile::release() {
  return std::exchange(descriptor_, -1);
}

std::string why_not_regular(const std::string& path) {
  struct stat status {};
  return stat(path.c_str(), &status) == 0 ? kind_of(status.st_mode) : "";
}

}  // namespace reprise
