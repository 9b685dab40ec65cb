#include "distributed/rank_token.h"

#include "base/file.h"
#include "base/paths.h"
#include "base/sha256.h"
#include "base/throw_error.h"

#include <array>
#include <cerrno>
#include <fcntl.h>
#include <filesystem>
#include <sys/stat.h>
#include <unistd.h>

namespace reprise::detail {
namespace {

constexpr const char* kFileVariable = "REPRISE_RANK_TOKEN_FILE";
constexpr size_t kLeastTokenBytes = 16;
constexpr size_t kMostTokenBytes = 4096;

struct OpenFile {
  explicit OpenFile(int file) : descriptor(file) {}
  ~OpenFile() {
    if (descriptor >= 0) close(descriptor);
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  int descriptor;
};

std::string checked(const std::string& text, const std::string& source) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  const size_t last = text.find_last_not_of(" \t\r\n");
  const std::string token =
      first == std::string::npos ? "" : text.substr(first, last - first + 1);
  if (token.size() < kLeastTokenBytes) {
    throw_error(
        "[ranks] expected a token of {} characters or more in {}, got {}; "
        "`openssl rand -hex 32` makes one",
        kLeastTokenBytes, source, token.size());
  }
  return token;
}

/// Reads a file that only this user, or root, can have written and read.
std::string read_secret(const std::string& path, int flags) {
  // A FIFO without a writer must not block.
  const OpenFile file(
      open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | flags));
  struct stat facts {};
  if (file.descriptor < 0 || fstat(file.descriptor, &facts) != 0) {
    throw_error("[ranks] cannot read the token in {}: {}", path,
                system_reason());
  }
  if (!S_ISREG(facts.st_mode) || (facts.st_mode & 077) != 0 ||
      (facts.st_uid != geteuid() && facts.st_uid != 0)) {
    throw_error(
        "[ranks] expected a token in a file that belongs to this user and that "
        "nobody else can read, got user {} and mode {:o}; use chmod 600 {}",
        facts.st_uid, facts.st_mode & 07777, path);
  }
  std::array<char, kMostTokenBytes> part;
  const ssize_t got = read(file.descriptor, part.data(), part.size());
  if (got < 0) {
    throw_error("[ranks] cannot read the token in {}: {}", path,
                system_reason());
  }
  return checked(std::string(part.data(), static_cast<size_t>(got)), path);
}

/// Creates the key file unless there is one. It appears with its contents: ranks that
/// start together read the same.
void create_key(const std::string& path) {
  const std::string temporary = path + "." + hex_text(random_bytes(8));
  const OpenFile file(
      open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  const std::string text = new_rank_token() + "\n";
  const bool written =
      file.descriptor >= 0 &&
      write_all(file.descriptor, text.data(), text.size()) &&
      (link(temporary.c_str(), path.c_str()) == 0 || errno == EEXIST);
  const int reason = errno;
  unlink(temporary.c_str());
  if (!written) {
    throw_error("[ranks] cannot create {}: {}", path, system_reason(reason));
  }
}

/// The key in `directory`, which may not exist yet.
std::string key_in(const std::string& directory) {
  std::error_code ignored;
  std::filesystem::create_directories(
      std::filesystem::path(directory).parent_path(), ignored);
  if (mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) {
    throw_error("[ranks] cannot make the directory {}: {}", directory,
                system_reason());
  }
  struct stat facts {};
  if (lstat(directory.c_str(), &facts) != 0 || !S_ISDIR(facts.st_mode) ||
      facts.st_uid != geteuid()) {
    throw_error("[ranks] {} is not a directory of this user", directory);
  }
  const std::string path = directory + "/rank-key";
  if (access(path.c_str(), F_OK) != 0) create_key(path);
  return read_secret(path, O_NOFOLLOW);
}

}  // namespace

std::string rank_token(
    const std::function<std::string(const char*)>& variable) {
  const std::string text = variable(kTokenVariable);
  if (!text.empty()) return checked(text, kTokenVariable);
  const std::string file = variable(kFileVariable);
  if (!file.empty()) return read_secret(file, 0);
  const std::string cache = cache_directory();
  std::string why = "neither XDG_CACHE_HOME nor HOME is set";
  if (!cache.empty()) {
    try {
      return key_in(cache);
    } catch (const Error& error) {
      why = error.what();
    }
  }
  // Containers often have no home directory that can be written.
  try {
    return key_in(fmt::format("/tmp/reprise-{}", geteuid()));
  } catch (const Error&) {
    throw_error("{}; set {} to the same secret on all ranks", why,
                kTokenVariable);
  }
}

std::string rank_token() {
  return rank_token(environment_variable);
}

std::string new_rank_token() {
  return hex_text(random_bytes(32));
}

}  // namespace reprise::detail
