#pragma once

#include <reprise/data/dataset.h>

namespace reprise::detail {

/// Noise of the shape the options ask for. A sample depends on the seed, the
/// split and its number alone.
std::shared_ptr<const Dataset> random_dataset(const DataOptions& options);

}  // namespace reprise::detail
