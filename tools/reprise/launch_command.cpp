#include "commands.h"

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

struct LaunchFlags {
  int ranks = 1;
  std::vector<std::string> words;
};

std::string own_path() {
  std::vector<char> path(PATH_MAX);
  const ssize_t size = readlink("/proc/self/exe", path.data(), path.size());
  if (size <= 0) throw std::runtime_error("[launch] cannot find this program");
  return {path.data(), static_cast<size_t>(size)};
}

int launch(const LaunchFlags& flags) {
  LaunchOptions options;
  options.ranks = flags.ranks;
  options.argv = {own_path()};
  for (const auto& word : flags.words) options.argv.push_back(word);
  options.say = [](const std::string& text) {
    fmt::print(stderr, "reprise: {}\n", text);
  };
  return launch_ranks(options);
}

}  // namespace

void add_launch(CLI::App& app, Action& action) {
  auto flags = std::make_shared<LaunchFlags>();
  CLI::App* launching = app.add_subcommand(
      "launch",
      "Run a subcommand as several ranks on this machine: launch -n 4 -- train "
      "…");
  launching->add_option("-n,--ranks", flags->ranks, "Processes")
      ->required()
      ->check(CLI::Range(1, 4096));
  launching
      ->add_option("command", flags->words,
                   "After --: the subcommand, train, with its flags")
      ->required();
  launching->footer(
      "Across machines use torchrun --no-python, mpirun or srun; reprise train "
      "finds\nits rank in their environment.\nExit status: 0 done, else that "
      "of the first rank that failed.");
  launching->callback(
      [flags, &action] { action = [flags] { return launch(*flags); }; });
}

}  // namespace reprise::command
