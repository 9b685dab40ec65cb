#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

/// Shared libraries with models and datasets (REPRISE_PLUGIN in reprise/command.h).
/// Tested by tests/tools/plugin_test.py.
namespace reprise::command {

/// Loads the plug-ins that the arguments name with --plugin or, if there are none, those of
/// the run that train --resume continues. Must be called before the flags are added, which
/// include the options of the models. Throws CLI::ValidationError if a plug-in cannot be
/// loaded or does not fit this program.
void load_plugins(const std::vector<std::string>& arguments);

/// Adds --plugin, which may be repeated. `paths` receives absolute paths, separated by ':'.
void add_plugin_flag(CLI::App& app, std::string& paths);

/// Arguments that pass `paths` on to another process of this program.
std::vector<std::string> plugin_words(const std::string& paths);

}  // namespace reprise::command
