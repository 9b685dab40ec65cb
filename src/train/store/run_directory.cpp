#include "base/file.h"

#include <reprise/train/run_directory.h>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <sys/file.h>
#include <unistd.h>
#include <utility>

namespace reprise {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

bool holds_a_run(const std::string& path) {
  return fs::exists(path + "/config.json");
}

int lock(const std::string& path) {
  const int descriptor =
      ::open((path + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  TORCH_CHECK(descriptor >= 0, "[run] cannot write ", path,
              "/lock: ", std::strerror(errno));
  if (flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
    close(descriptor);
    TORCH_CHECK(false, "[run] another process is training in ", path);
  }
  return descriptor;
}

/// Removes what killed processes have left beside the files of a run.
void remove_temporary_files(const std::string& path) {
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(path, none)) {
    const std::string name = entry.path().filename().string();
    const bool ours = name.starts_with("config.json.") ||
                      name.starts_with("summary.json.") ||
                      name.starts_with("state-");
    if (ours && is_temporary_file(name)) fs::remove(entry.path(), none);
  }
}

}  // namespace

RunDirectory::RunDirectory(std::string path, int lock)
    : path_(std::move(path)), lock_(lock) {}

RunDirectory::~RunDirectory() {
  if (lock_ >= 0) close(lock_);
}

RunDirectory::RunDirectory(RunDirectory&& other) noexcept
    : path_(std::move(other.path_)), lock_(std::exchange(other.lock_, -1)) {}

RunDirectory& RunDirectory::operator=(RunDirectory&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(lock_, other.lock_);
  return *this;
}

RunDirectory RunDirectory::create(const std::string& path,
                                  const std::string& config) {
  make_directories(path);
  TORCH_CHECK(!holds_a_run(path), "[run] ", path,
              " holds a run already; continue it with --resume ", path,
              ", or name another directory with --out");
  RunDirectory directory(path, lock(path));
  directory.set_config(config);
  return directory;
}

RunDirectory RunDirectory::open(const std::string& path) {
  TORCH_CHECK(holds_a_run(path), "[run] ", path,
              " holds no run (no config.json there)");
  RunDirectory directory(path, lock(path));
  remove_temporary_files(path);
  return directory;
}

std::string RunDirectory::config() const {
  return read_text(path_ + "/config.json");
}

void RunDirectory::set_config(const std::string& config) {
  AtomicFile file(path_ + "/config.json");
  file.write(config + "\n");
  file.commit();
}

void RunDirectory::update_config(const std::string& values) {
  ordered_json object;
  try {
    object = ordered_json::parse(config());
    object.update(ordered_json::parse(values));
  } catch (const nlohmann::json::exception& error) {
    TORCH_CHECK(false, "[run] ", path_,
                "/config.json is not an object: ", error.what());
  }
  set_config(object.dump(2));
}

}  // namespace reprise
