#include "base/append_log.h"

#include "base/file.h"
#include "base/throw_error.h"

#include <cerrno>
#include <fcntl.h>
#include <filesystem>
#include <limits>
#include <sys/file.h>
#include <unistd.h>
#include <utility>

namespace reprise::detail {

AppendLog::AppendLog(std::string path, std::string owner, Mode mode)
    : path_(std::move(path)), owner_(std::move(owner)) {
  const int exclusive = mode == Mode::kCreateNew ? O_EXCL : 0;
  file_ = open(path_.c_str(),
               O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | exclusive, 0644);
  if (file_ < 0) throw_cannot_write(errno);
  try {
    bytes_ = find_end();
  } catch (...) {
    close(file_);
    throw;
  }
}

AppendLog::~AppendLog() {
  close(file_);
}

int64_t AppendLog::find_end() const {
  const int64_t end = lseek(file_, 0, SEEK_END);
  if (end < 0) throw_cannot_write(errno);
  return end;
}

bool AppendLog::try_lock() {
  if (flock(file_, LOCK_EX | LOCK_NB) != 0) return false;
  // The previous owner may have appended since this file was opened.
  bytes_ = find_end();
  return true;
}

void AppendLog::truncate(int64_t bytes) {
  const int64_t size = find_end();
  if (size < bytes) {
    throw_error("[{}] expected at least {} bytes in {}, found {}", owner_,
                bytes, path_, size);
  }
  if (ftruncate(file_, bytes) != 0) throw_cannot_write(errno);
  bytes_ = bytes;
  torn_ = false;
}

void AppendLog::truncate_incomplete_line() {
  // One process writes it, so that its size is no danger.
  const std::string text =
      read_text(path_, std::numeric_limits<int64_t>::max());
  const size_t last = text.rfind('\n');
  const size_t complete = last == std::string::npos ? 0 : last + 1;
  bytes_ = static_cast<int64_t>(complete);
  if (complete < text.size()) truncate(bytes_);
}

void AppendLog::append(std::string_view record) {
  if (torn_) truncate(bytes_);
  if (!write_all(file_, record.data(), record.size())) {
    const int reason = errno;
    torn_ = ftruncate(file_, bytes_) != 0;
    throw_cannot_write(reason);
  }
  bytes_ += static_cast<int64_t>(record.size());
}

void AppendLog::sync() {
  if (fsync(file_) != 0) throw_cannot_write(errno);
  if (entry_synced_) return;
  sync_directory(std::filesystem::path(path_).parent_path().string());
  entry_synced_ = true;
}

void AppendLog::throw_cannot_write(int reason) const {
  throw_error("[{}] cannot write {}: {}", owner_, path_, system_reason(reason));
}

}  // namespace reprise::detail
