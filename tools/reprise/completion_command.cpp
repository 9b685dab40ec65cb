#include "commands.h"
#include "completion.h"
#include "errors.h"
#include "field_flags.h"
#include "man_page.h"
#include "plugins.h"

#include <algorithm>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>

namespace reprise::command {
namespace {

struct CompletionFlags {
  Shell shell = Shell::kBash;
  std::string plugin;
};

}  // namespace

std::vector<std::string> plain_words(const std::vector<std::string>& words) {
  std::vector<std::string> plain;
  std::copy_if(words.begin(), words.end(), std::back_inserter(plain),
               [](const std::string& word) {
                 constexpr const char* kPlain =
                     "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                     "0123456789_.,:=+-";
                 return !word.empty() && word.front() != '-' &&
                        word.front() != '=' &&
                        word.find_first_not_of(kPlain) == std::string::npos;
               });
  return plain;
}

std::string completion_script(const CommandTree& tree, Shell shell) {
  switch (shell) {
    case Shell::kBash:
      return bash_completion(tree);
    case Shell::kZsh:
      return zsh_completion(tree);
    case Shell::kFish:
      return fish_completion(tree);
  }
  return "";
}

void add_completion(CLI::App& app, Action& action) {
  auto flags = std::make_shared<CompletionFlags>();
  CLI::App* completion = app.add_subcommand(
      "completion", "Print the script with which a shell completes reprise");
  const std::vector<std::string> shells = names_of<Shell>();
  CLI::Option* shell = completion->add_option_function<std::string>(
      "shell",
      [flags](const std::string& name) {
        flags->shell = from_text<Shell>(name);
      },
      "Shell that the script is for");
  shell->required()->type_name("bash|zsh|fish");
  set_check(shell, one_of(shells));
  set_words(shell, shells);
  add_plugin_flag(*completion, flags->plugin);
  completion->footer(
      std::string(
          "Installed packages contain the scripts. Without one:\n"
          "  bash  reprise completion bash "
          ">~/.local/share/bash-completion/completions/reprise\n"
          "  zsh   reprise completion zsh >DIR/_reprise, for a DIR in $fpath\n"
          "  fish  reprise completion fish "
          ">~/.config/fish/completions/reprise.fish\n"
          "With --plugin, the script knows the plug-in's models and their "
          "options.\n") +
      kStatuses);
  completion->callback([flags, &app, &action] {
    action = [flags, &app] {
      std::cout << completion_script(describe(app), flags->shell);
      return kDone;
    };
  });
}

void add_man(CLI::App& app, Action& action) {
  CLI::App* man = app.add_subcommand(
      "man", "Print the manual page, to be read with: reprise man | man -l -");
  man->footer(kStatuses);
  man->callback([&app, &action] {
    action = [&app] {
      std::cout << man_page(describe(app));
      return kDone;
    };
  });
}

}  // namespace reprise::command
