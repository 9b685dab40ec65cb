#include "train/store/state_names.h"

#include "base/file.h"
#include "base/throw_error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string_view>

namespace reprise::detail {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "state-";
constexpr std::string_view kSuffix = ".safetensors";
constexpr std::string_view kPart = ".part-";
constexpr std::string_view kBroken = ".broken";

std::string file_name(const std::string& path) {
  return fs::path(path).filename().string();
}

std::string directory_of(const std::string& path) {
  return fs::path(path).parent_path().string();
}

/// Path of a state without the ending.
std::string base_of(const std::string& state) {
  return state.substr(0, state.size() - kSuffix.size());
}

bool is_part(const std::string& name) {
  return name.find(kPart) != std::string::npos;
}

/// Name of a temporary file of an earlier version.
bool is_earlier_temporary(const std::string& name) {
  return name.find(".safetensors.tmp.") != std::string::npos;
}

/// Sorted paths of the files that `wanted` accepts by name, among those whose names begin
/// like a state's.
template <class Wanted>
std::vector<std::string> files_in(const std::string& directory,
                                  const Wanted& wanted) {
  std::vector<std::string> paths;
  std::error_code error;
  fs::directory_iterator entries(directory, error);
  for (; !error && entries != fs::directory_iterator();
       entries.increment(error)) {
    const std::string name = entries->path().filename().string();
    if (name.starts_with(kPrefix) && wanted(name)) {
      paths.push_back(entries->path().string());
    }
  }
  if (error) {
    throw_error("[run] cannot read the directory {}: {}", directory,
                error.message());
  }
  std::sort(paths.begin(), paths.end());  // their numbers have a fixed width
  return paths;
}

/// A name that is not in use.
std::string broken_name(const std::string& path) {
  std::string name = fmt::format("{}{}", path, kBroken);
  std::error_code none;
  for (int i = 2; fs::exists(fs::symlink_status(name, none)); ++i) {
    name = fmt::format("{}{}-{}", path, kBroken, i);
  }
  return name;
}

void rename_path(const std::string& from, const std::string& to) {
  if (std::rename(from.c_str(), to.c_str()) == 0) return;
  throw_error("[run] cannot rename {} to {}: {}", from, to, system_reason());
}

void remove_file(const std::string& path) {
  std::error_code error;
  fs::remove(path, error);
  if (error) {
    throw_error("[run] cannot remove {}: {}", path, error.message());
  }
}

}  // namespace

std::string state_path(const std::string& directory, int64_t step,
                       int64_t micro) {
  return fmt::format("{}/{}{:010}-{:06}{}", directory, kPrefix, step, micro,
                     kSuffix);
}

std::string part_path(const std::string& state, int rank) {
  return fmt::format("{}{}{}{}", base_of(state), kPart, rank, kSuffix);
}

std::vector<std::string> states_in(const std::string& directory) {
  return files_in(directory, [](const std::string& name) {
    return name.ends_with(kSuffix) && !is_part(name);
  });
}

std::vector<std::string> parts_of(const std::string& state) {
  const std::string begin = file_name(base_of(state)) + std::string(kPart);
  return files_in(directory_of(state), [&](const std::string& name) {
    return name.starts_with(begin) && name.ends_with(kSuffix);
  });
}

std::vector<std::string> set_aside_in(const std::string& directory) {
  return files_in(directory, [](const std::string& name) {
    return name.find(kBroken) != std::string::npos;
  });
}

std::vector<std::string> remains_in(const std::string& directory) {
  const auto states = states_in(directory);
  return files_in(directory, [&](const std::string& name) {
    if (is_temporary_file(name) || is_earlier_temporary(name)) return true;
    if (!name.ends_with(kSuffix) || !is_part(name)) return false;
    const std::string state = fmt::format(
        "{}/{}{}", directory, name.substr(0, name.find(kPart)), kSuffix);
    return !std::binary_search(states.begin(), states.end(), state);
  });
}

std::string set_aside(const std::string& state) {
  const auto parts = parts_of(state);
  const std::string name = broken_name(state);
  // First the file without which the others are no state.
  rename_path(state, name);
  for (const std::string& part : parts) rename_path(part, broken_name(part));
  sync_directory(directory_of(state));
  return name;
}

void remove_state(const std::string& state) {
  const auto parts = parts_of(state);
  remove_file(state);
  for (const std::string& part : parts) remove_file(part);
}

}  // namespace reprise::detail
