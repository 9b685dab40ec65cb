#include "commands.h"
#include "errors.h"
#include "output.h"
#include "plugins.h"
#include "version_text.h"

#include <reprise/command.h>
#include <reprise/memory/meter.h>
#include <reprise/version.h>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

namespace reprise::command {
namespace {

int fail(const std::string& message) {
  std::cerr << "reprise: " << message << "\n";
  return kFailed;
}

int refuse(const CLI::App& app, const std::string& message) {
  std::cerr << "reprise: " << message << "\nSee: " << help_command(app) << "\n";
  return kWrongUsage;
}

/// Adds --version, with --format.
void add_version(CLI::App& app) {
  const auto format = std::make_shared<OutputFormat>(OutputFormat::kTable);
  // Before --version, whose callback reads its value.
  CLI::Option* option =
      add_choice(app, "--format", *format, "Format of --version");
  app.set_version_flag(
      "--version", [format] { return version_text(build_info(), *format); },
      "Print the version and how it was built");
  option->needs("--version");
}

void add_all(CLI::App& app, Action& action) {
  app.require_subcommand(1);
  add_version(app);
  app.footer(
      std::string("Results go to standard output, progress to standard error.\n"
                  "Status 2 means that nothing was started: a flag, a value or "
                  "a file is wrong.\n") +
      kStatuses);
  add_train(app, action);
  add_launch(app, action);
  add_plan(app, action);
  add_profile(app, action);
  add_report(app, action);
  add_verify(app, action);
  add_study(app, action);
  add_devices(app, action);
  add_check(app, action);
  add_completion(app, action);
  add_man(app, action);
}

/// Registers models and datasets, then adds the subcommands, whose flags include the
/// options of the models. Prints errors and returns the exit status.
int prepare(CLI::App& app, Action& action, void (*register_own)(),
            const std::vector<std::string>& arguments) {
  try {
    if (register_own != nullptr) register_own();
    load_plugins(arguments);
    add_all(app, action);
    return kDone;
  } catch (const CLI::OptionAlreadyAdded& error) {
    return refuse(app, std::string("an option of a model has the name of a "
                                   "flag; rename it: ") +
                           error.what());
  } catch (const CLI::Error& error) {
    return refuse(app, error.what());
  } catch (const std::exception& error) {
    return refuse(app, user_message(error));
  }
}

/// Runs the command, prints errors and returns the exit status.
int run(CLI::App& app, const Action& action, int argc, char** argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {  // --help, --version
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    return refuse(app, parse_message(app, error));
  }
  try {
    count_cpu_memory();  // before the first tensor
    return action();
  } catch (const CLI::Error& error) {
    return refuse(app, error.what());
  } catch (const std::bad_alloc&) {
    return fail("out of memory; try a smaller --batch or a smaller model");
  } catch (const std::exception& error) {
    const std::string message = user_message(error);
    return is_wrong_usage(error) ? refuse(app, message) : fail(message);
  }
}

/// Returns `status`, or kFailed if standard output could not be written.
int check_output(int status) {
  errno = 0;
  std::cout.flush();
  const bool written =
      std::fflush(stdout) == 0 && std::ferror(stdout) == 0 && std::cout.good();
  if (written) return status;
  const std::string why = errno != 0 ? std::strerror(errno) : "write error";
  std::cerr << "reprise: cannot write to standard output: " << why << "\n";
  return status == kDone ? kFailed : status;
}

}  // namespace
}  // namespace reprise::command

int reprise::run_command(int argc, char** argv, void (*register_own)()) {
  command::open_standard_streams();
  CLI::App app(
      "Reprise trains a model within a memory budget: it recomputes "
      "activations "
      "instead of keeping them and accumulates gradients over micro-batches.",
      "reprise");
  command::Action action;
  const std::vector<std::string> arguments(argv + std::min(argc, 1),
                                           argv + argc);
  const int status = command::prepare(app, action, register_own, arguments);
  if (status != command::kDone) return status;
  return command::check_output(command::run(app, action, argc, argv));
}
