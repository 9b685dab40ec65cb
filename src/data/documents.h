#pragma once

#include <reprise/data/dataset.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace reprise::detail {

/// A range of tokens. `read` copies the `count` tokens from `first` on to `out`, and is
/// thread-safe.
struct TokenRange {
  std::string name{};
  int64_t length = 0;
  std::function<void(int64_t first, int64_t count, int64_t* out)> read{};
};

/// Makes the dataset of the documents in `tokens`, padded or packed to
/// `options.seq`; see DocumentMode. Documents of one token have nothing to predict and
/// are left out. Throws c10::Error if there are no others.
std::shared_ptr<const Dataset> make_documents(TokenRange tokens,
                                              const DataOptions& options);

}  // namespace reprise::detail
