#include "base/text_check.h"
#include "checks.h"
#include "commands.h"
#include "field_flags.h"
#include "output.h"
#include "plugins.h"
#include "train_flags.h"

#include <reprise/distributed/launch.h>

#include <fmt/format.h>

#include <climits>
#include <cstdio>
#include <memory>
#include <string>
#include <unistd.h>
#include <vector>

namespace reprise::command {
namespace {

/// Subcommands that ranks can run.
const std::vector<std::string> kCommands = {"train"};

struct LaunchFlags {
  int ranks = 1;
  std::string plugin;
  std::vector<std::string> words;
};

std::string own_path() {
  std::vector<char> path(PATH_MAX);
  const ssize_t size = readlink("/proc/self/exe", path.data(), path.size());
  if (size <= 0) throw std::runtime_error("[launch] cannot find this program");
  return {path.data(), static_cast<size_t>(size)};
}

/// Checks the command before it is launched, so that errors are reported once
/// instead of once per rank.
void check_words(const LaunchFlags& flags) {
  const std::string error = one_of(kCommands)(flags.words.front());
  if (!error.empty()) throw CLI::ValidationError("after --", error);
  try {
    parse_train_flags({flags.words.begin() + 1, flags.words.end()},
                      flags.ranks);
  } catch (const CLI::Success&) {
    // For --help; the first rank prints the text.
  }
}

int launch(const LaunchFlags& flags) {
  check_words(flags);
  LaunchOptions options;
  options.ranks = flags.ranks;
  options.argv = {own_path()};
  for (const auto& word : flags.words) options.argv.push_back(word);
  for (const auto& word : plugin_words(flags.plugin)) {
    options.argv.push_back(word);
  }
  options.say = [](const std::string& text) {
    print_text("reprise: " + text + "\n");
  };
  ignore_output_signals();
  return launch_ranks(options);
}

}  // namespace

void add_launch(CLI::App& app, Action& action) {
  auto flags = std::make_shared<LaunchFlags>();
  CLI::App* launching = app.add_subcommand(
      "launch",
      "Run train with several ranks on this machine: launch -n 4 -- train …");
  set_check(
      launching->add_option("-n,--ranks", flags->ranks, "Number of processes")
          ->required(),
      whole_number(1, 1024));
  add_plugin_flag(*launching, flags->plugin);
  CLI::Option* command =
      launching
          ->add_option("command", flags->words,
                       "After --: the subcommand, train, with its flags")
          ->required()
          ->type_name("-- train FLAGS");
  set_words(command, kCommands);
  launching->footer(
      "Across machines use torchrun --no-python, mpirun or srun; reprise train "
      "finds\nits rank in their environment.\nExit status: 0 done, 2 wrong "
      "usage, 130 interrupted, else that of the first\nrank that failed.");
  launching->callback(
      [flags, &action] { action = [flags] { return launch(*flags); }; });
}

}  // namespace reprise::command
