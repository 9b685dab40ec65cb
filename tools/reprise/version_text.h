#pragma once

#include "config_options.h"

#include <reprise/version.h>

#include <string>

namespace reprise::command {

/// Returns what --version prints, without a line break at the end.
/// Tested by tests/tools/version_test.sh.
std::string version_text(const BuildInfo& build, OutputFormat format);

}  // namespace reprise::command
