#pragma once

#include <reprise/data/dataset.h>

namespace reprise::detail {

/// Whether the extension is one of binary tokens: ".bin", ".bin32" or ".u32".
bool has_token_name(const std::string& path);

/// Opens the file `options.name`. If has_token_name(), its header states the width of the
/// tokens, and without a header ".bin" means uint16 and the others uint32. Otherwise it is
/// text whose bytes are the tokens.
std::shared_ptr<const Dataset> open_tokens(const DataOptions& options);

}  // namespace reprise::detail
