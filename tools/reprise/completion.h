#pragma once

#include "command_tree.h"

#include <reprise/base/enum_text.h>

#include <array>
#include <string>
#include <string_view>
#include <vector>

/// Completion of the command line in shells. A script knows all subcommands, flags and
/// values, so that completing does not start the command, which loads LibTorch.
/// Tested by tests/tools/completion_test.sh.
namespace reprise::command {

enum class Shell { kBash, kZsh, kFish };

/// Returns the completion script of `tree` for the shell.
std::string completion_script(const CommandTree& tree, Shell shell);

std::string bash_completion(const CommandTree& tree);
std::string zsh_completion(const CommandTree& tree);
std::string fish_completion(const CommandTree& tree);

/// Words that are the same in every shell without quotes, and no flags; others are left
/// out.
std::vector<std::string> plain_words(const std::vector<std::string>& words);

}  // namespace reprise::command

template <>
struct reprise::EnumText<reprise::command::Shell> {
  static constexpr std::array<std::string_view, 3> names{"bash", "zsh", "fish"};
};
