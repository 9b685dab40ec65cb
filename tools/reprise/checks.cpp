#include "checks.h"

#include "base/file.h"
#include "base/input_file.h"
#include "base/nearest.h"

#include <reprise/data/dataset.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <unistd.h>
#include <utility>

namespace reprise::command {
namespace {

namespace fs = std::filesystem;

const char* const kNoPath = "expected a path, got ''";

/// Returns why the file cannot be read; empty if it can. Sets `missing` if
/// there is no such file.
std::string why_unreadable(const std::string& path, bool* missing = nullptr) {
  if (path.empty()) return kNoPath;
  const std::string kind = why_not_regular(path);
  if (!kind.empty()) {
    return fmt::format("expected a file, {} is {}", path, kind);
  }
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) {
    if (missing != nullptr) *missing = errno == ENOENT;
    return fmt::format("cannot read {}: {}", path, std::strerror(errno));
  }
  close(file);
  return "";
}

/// A file that can be read, or a directory with such a file of one of the `names`.
FieldCheck file_or_directory_with(std::vector<std::string> names) {
  return [names = std::move(names)](const std::string& path) -> std::string {
    std::error_code none;
    if (!fs::is_directory(path, none)) return why_unreadable(path);
    for (const std::string& name : names) {
      bool missing = false;
      const std::string why =
          why_unreadable((fs::path(path) / name).string(), &missing);
      if (!missing) return why;
    }
    return fmt::format("{} has no {}", path, fmt::join(names, " or "));
  };
}

}  // namespace

FieldCheck readable_file() {
  return [](const std::string& path) { return why_unreadable(path); };
}

FieldCheck readable_results() {
  return file_or_directory_with({"results.jsonl"});
}

FieldCheck readable_weights() {
  return file_or_directory_with(
      {"model.safetensors.index.json", "model.safetensors"});
}

FieldCheck readable_adapter() {
  return file_or_directory_with({"adapter_config.json"});
}

FieldCheck data_source() {
  return [](const std::string& text) -> std::string {
    const std::vector<std::string> names = dataset_names();
    if (std::find(names.begin(), names.end(), text) != names.end()) return "";
    bool missing = false;
    const std::string why = why_unreadable(text, &missing);
    if (!missing) return why;
    return fmt::format(
        "expected {} or the path of a file, got '{}', and there is no such "
        "file{}",
        fmt::join(names, ", "), text, did_you_mean(text, names));
  };
}

FieldCheck writable_file() {
  return [](const std::string& path) -> std::string {
    if (path.empty()) return kNoPath;
    std::error_code none;
    const fs::file_status status = fs::status(path, none);
    if (fs::exists(status) && !fs::is_regular_file(status)) {
      return fmt::format(
          "expected a file that can be replaced, {} is {}", path,
          fs::is_directory(status) ? "a directory" : "no regular file");
    }
    const std::string why = why_not_created(path);
    return why.empty() ? "" : fmt::format("cannot write {}: {}", path, why);
  };
}

FieldCheck writable_export() {
  return [file = writable_file()](const std::string& path) -> std::string {
    std::error_code none;
    const std::string name = path.substr(0, path.find_last_not_of('/') + 1);
    return name.empty() || fs::is_directory(path, none) ? not_empty()(path)
                                                        : file(name);
  };
}

FieldCheck writable_directory() {
  return [](const std::string& path) -> std::string {
    return path.empty() ? kNoPath : why_directory_unwritable(path);
  };
}

FieldCheck not_empty() {
  return [](const std::string& text) -> std::string {
    return text.empty() ? kNoPath : "";
  };
}

}  // namespace reprise::command
