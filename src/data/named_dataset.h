#pragma once

#include <reprise/data/dataset.h>

#include <memory>
#include <string>
#include <vector>

namespace reprise::detail {

/// Name of a built-in dataset and how it is opened. Its source file defines
/// `std::vector<NamedDataset> <source>_datasets()` and is registered in
/// CMakeLists.txt. Tested by tests/data/dataset_test.cpp.
struct NamedDataset {
  std::string name;
  std::shared_ptr<const Dataset> (*open)(const DataOptions& options);
};

}  // namespace reprise::detail
