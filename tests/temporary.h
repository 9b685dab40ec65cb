#pragma once

#include "base/paths.h"

#include <string>

namespace reprise::testing {

/// A directory that is removed when the test ends.
class TemporaryDirectory : public reprise::TemporaryDirectory {
 public:
  TemporaryDirectory() : reprise::TemporaryDirectory("reprise-test-") {}

  std::string operator/(const std::string& name) const {
    return path() + "/" + name;
  }
};

}  // namespace reprise::testing
