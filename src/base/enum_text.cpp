#include "base/text_check.h"

#include <reprise/base/enum_text.h>
#include <reprise/base/error.h>

#include <algorithm>

namespace reprise {

size_t index_of_name(std::string_view text,
                     const std::vector<std::string>& names) {
  const auto found = std::find(names.begin(), names.end(), text);
  if (found == names.end()) throw Error(one_of(names)(std::string(text)));
  return static_cast<size_t>(found - names.begin());
}

}  // namespace reprise
