#pragma once

#include <CLI/CLI.hpp>

#include <functional>

/// One function per subcommand, which adds the subcommand to `app`. If the
/// subcommand is selected, `action` is set to a function that runs it and
/// returns the exit status. Tested by tests/tools/command_test.sh and the other
/// scripts in tests/tools.
namespace reprise::command {

using Action = std::function<int()>;

void add_check(CLI::App& app, Action& action);
void add_completion(CLI::App& app, Action& action);
void add_devices(CLI::App& app, Action& action);
void add_launch(CLI::App& app, Action& action);
void add_man(CLI::App& app, Action& action);
void add_plan(CLI::App& app, Action& action);
void add_profile(CLI::App& app, Action& action);
void add_report(CLI::App& app, Action& action);
void add_study(CLI::App& app, Action& action);
void add_train(CLI::App& app, Action& action);
void add_verify(CLI::App& app, Action& action);

}  // namespace reprise::command
