#pragma once

#include <reprise/data/dataset.h>

namespace reprise::detail {

/// Opens the file `options.name`: uint16 tokens if its extension is ".bin", otherwise
/// text whose bytes are the tokens.
std::shared_ptr<const Dataset> open_tokens(const DataOptions& options);

}  // namespace reprise::detail
