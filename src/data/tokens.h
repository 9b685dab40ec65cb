#pragma once

#include <reprise/data/dataset.h>

namespace reprise::detail {

/// The file `options.name`: uint16 tokens where it ends in ".bin", else text
/// whose bytes are the tokens.
std::shared_ptr<const Dataset> open_tokens(const DataOptions& options);

}  // namespace reprise::detail
