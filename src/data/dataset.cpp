#include "base/input_file.h"
#include "base/text_check.h"
#include "data/idx.h"
#include "data/named_dataset.h"
#include "data/tokens.h"

#include <reprise/data/dataset.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <system_error>
#include <utility>

namespace reprise {
namespace detail {

// reprise_datasets.inc has the sources that CMakeLists.txt registers.
#define REPRISE_REGISTERED(source) \
  std::vector<NamedDataset> source##_datasets();
#include <reprise_datasets.inc>
#undef REPRISE_REGISTERED

}  // namespace detail

namespace {

namespace fs = std::filesystem;

std::vector<DatasetEntry>& entries() {
  static std::vector<DatasetEntry> all = [] {
    std::vector<DatasetEntry> list;
    const auto add = [&list](const std::vector<detail::NamedDataset>& some) {
      for (const auto& dataset : some) {
        list.push_back({dataset.name, dataset.open});
      }
    };
#define REPRISE_REGISTERED(source) add(detail::source##_datasets());
#include <reprise_datasets.inc>
#undef REPRISE_REGISTERED
    return list;
  }();
  return all;
}

}  // namespace

void register_dataset(DatasetEntry entry) {
  TORCH_CHECK(is_plain_name(entry.name),
              "[register_dataset] expected a name of letters, digits, '.', '-' "
              "and '_', got '",
              entry.name, "'");
  TORCH_CHECK(find_dataset(entry.name) == nullptr,
              "[register_dataset] there is a dataset '", entry.name,
              "' already; choose another name");
  TORCH_CHECK(entry.open != nullptr,
              "[register_dataset] expected a function that opens '", entry.name,
              "', got null");
  entries().push_back(std::move(entry));
}

const DatasetEntry* find_dataset(std::string_view name) {
  for (const DatasetEntry& entry : entries()) {
    if (entry.name == name) return &entry;
  }
  return nullptr;
}

std::vector<std::string> dataset_names() {
  std::vector<std::string> list;
  for (const DatasetEntry& entry : entries()) list.push_back(entry.name);
  return list;
}

std::shared_ptr<const Dataset> open_dataset(const DataOptions& options) {
  const std::string& name = options.name;
  if (const DatasetEntry* entry = find_dataset(name)) {
    auto dataset = entry->open(options);
    TORCH_CHECK(dataset != nullptr, "[dataset] expected '", name,
                "' to open a dataset, got null");
    return dataset;
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
  const std::string kind = why_not_regular(name);
  TORCH_CHECK(kind.empty(), "[dataset] expected a file, ", name, " is ", kind);
  if (!options.tokens) {
    return detail::open_idx(name, fs::path(name).filename().string(), options);
  }
  TORCH_CHECK(!options.classify,
              "[dataset] this model takes sequences with a class, but ", name,
              " has none; choose random");
  TORCH_CHECK(detail::has_token_name(name) || !detail::looks_like_idx(name),
              "[dataset] this model takes tokens, but ", name,
              " has IDX data; choose random or a file of text or tokens");
  return detail::open_tokens(options);
}

}  // namespace reprise
