#include "base/paths.h"
#include "data/idx.h"
#include "data/random.h"
#include "data/tokens.h"

#include <reprise/data/dataset.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <system_error>

namespace reprise {
namespace {

namespace fs = std::filesystem;

/// Where a dataset known by name may lie, in order. scripts/data.sh puts them
/// there.
std::vector<fs::path> places(const std::string& name) {
  std::vector<fs::path> folders;
  const std::string own = environment_variable("REPRISE_DATA");
  const std::string cache = cache_directory();
  if (!own.empty()) folders.push_back(fs::path(own) / name);
  if (!cache.empty()) folders.push_back(fs::path(cache) / name);
  folders.push_back(fs::path("/usr/share/datasets") / name);  // Debian's
  return folders;
}

std::string find_by_name(const std::string& name) {
  std::string looked;
  for (const fs::path& folder : places(name)) {
    const std::string found =
        detail::plain_or_gzipped(folder / "train-images-idx3-ubyte");
    if (!found.empty()) return found;
    looked += (looked.empty() ? "" : ", ") + folder.string();
  }
  TORCH_CHECK(false, "[dataset] ", name, " was not found (searched in ", looked,
              "); download it with: scripts/data.sh ", name);
}

/// Images in IDX files that are looked for by their name.
std::shared_ptr<const Dataset> open_named_images(const DataOptions& options) {
  TORCH_CHECK(!options.tokens, "[dataset] expected tokens for this model, ",
              options.name,
              " has images; choose random or a file of text or tokens");
  return detail::open_idx(find_by_name(options.name), options.name, options);
}

/// A dataset with a name. To add one, write a function that opens it and an entry
/// in named_datasets().
struct NamedDataset {
  const char* name;
  std::shared_ptr<const Dataset> (*open)(const DataOptions& options);
};

const std::vector<NamedDataset>& named_datasets() {
  static const std::vector<NamedDataset> list = {
      {"mnist", open_named_images},
      {"fashion-mnist", open_named_images},
      {"random", detail::random_dataset},
  };
  return list;
}

}  // namespace

const std::vector<std::string>& dataset_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const auto& dataset : named_datasets()) list.push_back(dataset.name);
    return list;
  }();
  return names;
}

std::shared_ptr<const Dataset> open_dataset(const DataOptions& options) {
  const std::string& name = options.name;
  for (const auto& dataset : named_datasets()) {
    if (name == dataset.name) return dataset.open(options);
  }

  std::error_code ignored;
  const auto status = fs::status(name, ignored);
  TORCH_CHECK(fs::exists(status), "[dataset] expected ",
              fmt::format("{}", fmt::join(dataset_names(), ", ")),
              " or the path of a file, got \"", name,
              "\", and there is no such file");
  TORCH_CHECK(!fs::is_directory(status), "[dataset] expected a file, ", name,
              " is a directory; name the file of training images, text or "
              "tokens in it");
  if (!options.tokens) {
    return detail::open_idx(name, fs::path(name).filename().string(), options);
  }
  TORCH_CHECK(!options.classify,
              "[dataset] this model takes sequences with a class, but ", name,
              " has none; choose random");
  TORCH_CHECK(
      fs::path(name).extension() == ".bin" || !detail::looks_like_idx(name),
      "[dataset] this model takes tokens, but ", name,
      " has IDX data; choose random or a file of text or tokens");
  return detail::open_tokens(options);
}

}  // namespace reprise
