#include "data/idx.h"
#include "data/named_dataset.h"
#include "data/tokens.h"

#include <reprise/data/dataset.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <system_error>

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

const std::vector<detail::NamedDataset>& named_datasets() {
  static const std::vector<detail::NamedDataset> list = [] {
    std::vector<detail::NamedDataset> all;
    const auto add = [&all](const std::vector<detail::NamedDataset>& some) {
      all.insert(all.end(), some.begin(), some.end());
    };
#define REPRISE_REGISTERED(source) add(detail::source##_datasets());
#include <reprise_datasets.inc>
#undef REPRISE_REGISTERED
    return all;
  }();
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
  TORCH_CHECK(detail::has_token_name(name) || !detail::looks_like_idx(name),
              "[dataset] this model takes tokens, but ", name,
              " has IDX data; choose random or a file of text or tokens");
  return detail::open_tokens(options);
}

}  // namespace reprise
