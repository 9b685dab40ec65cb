#include "checks.h"
#include "commands.h"
#include "config_options.h"
#include "errors.h"
#include "field_flags.h"

#include <reprise/train/check.h>

#include <iostream>
#include <memory>
#include <string>

namespace reprise::command {
namespace {

struct CheckFlags {
  std::string directory;
  bool repair = false;
  OutputFormat format = OutputFormat::kTable;
};

int check_with(const CheckFlags& flags) {
  const CheckResult result = check_run(flags.directory, flags.repair);
  if (flags.format == OutputFormat::kJson) {
    std::cout << to_json(result) << std::endl;
  } else {
    std::cout << to_table(result) << std::flush;
  }
  return result.whole() ? kDone : kFailed;
}

}  // namespace

void add_check(CLI::App& app, Action& action) {
  auto flags = std::make_shared<CheckFlags>();
  CLI::App* check = app.add_subcommand(
      "check", "Check whether the files of a run or a study are whole");
  set_check(check
                ->add_option("directory", flags->directory,
                             "Directory of a run or of a study")
                ->required()
                ->type_name("DIR"),
            not_empty());
  check->add_flag("--repair", flags->repair,
                  "Set broken states aside as *.broken, so that --resume "
                  "continues from the newest whole one");
  add_format_flag(*check, flags->format);
  check->footer(
      "Reads every byte and compares checksums. Changes nothing without "
      "--repair.\nExit status: 0 all files are whole, 1 some are not, 2 wrong "
      "usage.");
  check->callback(
      [flags, &action] { action = [flags] { return check_with(*flags); }; });
}

}  // namespace reprise::command
