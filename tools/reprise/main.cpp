#include "commands.h"
#include "version.h"

#include <reprise/data/nearest.h>
#include <reprise/memory/meter.h>
#include <reprise/torch/version.h>

#include <CLI/CLI.hpp>
#include <c10/util/Exception.h>

#include <exception>
#include <iostream>
#include <string>
#include <vector>

namespace {

constexpr int kFailed = 1;
constexpr int kWrongUsage = 2;

/// The first word nobody understood, and what it was near to.
std::string hint(const CLI::App& app) {
  const CLI::App* chosen = &app;
  if (!app.get_subcommands().empty()) chosen = app.get_subcommands().front();
  std::vector<std::string> names;
  for (const CLI::Option* option : chosen->get_options()) {
    for (const auto& name : option->get_lnames()) names.push_back("--" + name);
  }
  if (chosen == &app) {
    for (const CLI::App* sub : app.get_subcommands({})) {
      names.push_back(sub->get_name());
    }
  }
  for (const std::string& word : app.remaining(/*recurse=*/true)) {
    const std::string near = reprise::nearest(word, names);
    if (!near.empty()) return "; did you mean " + near + "?";
  }
  return "";
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Reprise trains a model inside a memory budget: it recomputes "
      "activations "
      "instead of keeping them, and accumulates gradients over micro-batches.",
      "reprise");
  app.require_subcommand(1);
  app.set_version_flag("--version", "reprise " + reprise::command::version() +
                                        ", LibTorch " +
                                        reprise::compat::libtorch_version());
  app.footer(
      "Results go to standard output, progress to standard error.\n"
      "Exit status: 0 done, 1 failed, 2 wrong usage.");
  reprise::command::Action action;
  reprise::command::add_train(app, action);
  reprise::command::add_launch(app, action);
  reprise::command::add_plan(app, action);
  reprise::command::add_profile(app, action);
  reprise::command::add_report(app, action);
  reprise::command::add_verify(app, action);
  reprise::command::add_study(app, action);
  reprise::command::add_devices(app, action);

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {  // --help, --version
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    std::cerr << "reprise: " << error.what() << hint(app)
              << "\nTry: reprise --help\n";
    return kWrongUsage;
  }

  try {
    reprise::count_cpu_memory();  // before the first tensor
    return action();
  } catch (const CLI::Error& error) {
    std::cerr << "reprise: " << error.what() << "\n";
    return kWrongUsage;
  } catch (const c10::Error& error) {
    std::cerr << "reprise: " << error.what_without_backtrace() << "\n";
    return kFailed;
  } catch (const std::exception& error) {
    std::cerr << "reprise: " << error.what() << "\n";
    return kFailed;
  }
}
