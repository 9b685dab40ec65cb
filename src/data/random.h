#pragma once

#include <reprise/data/dataset.h>

namespace reprise::detail {

/// A dataset of random samples with the shape given by the options. A sample depends
/// only on the seed, the split and its index. Covered by tests/data/dataset_test.cpp.
std::shared_ptr<const Dataset> random_dataset(const DataOptions& options);

}  // namespace reprise::detail
