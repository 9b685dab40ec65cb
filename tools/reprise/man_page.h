#pragma once

#include "command_tree.h"

#include <string>

namespace reprise::command {

/// Returns the manual page of the command, section 1, in the language of man(7).
/// Tested by tests/tools/man_page_test.sh.
std::string man_page(const CommandTree& tree);

}  // namespace reprise::command
