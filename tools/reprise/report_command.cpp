#include "checks.h"
#include "commands.h"
#include "errors.h"
#include "field_flags.h"

#include <reprise/base/bytes.h>
#include <reprise/report/report.h>
#include <reprise/study/runner.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

namespace reprise::command {
namespace {

namespace fs = std::filesystem;

struct ReportFlags {
  std::vector<std::string> results;
  std::string out;
  std::string plots;
  std::string browser;
  ReportOptions options;
};

/// Returns the path of report.html in the directory of the first results.
std::string default_out(const std::string& results) {
  const fs::path path(results);
  const fs::path folder = fs::is_directory(path) ? path : path.parent_path();
  return (folder / "report.html").string();
}

/// Throws CLI::ValidationError if the files contain no results.
void check_results(const std::vector<std::string>& paths) {
  if (!read_results(paths).empty()) return;
  throw CLI::ValidationError(fmt::format(
      "{}: expected results of runs, got none; reprise study makes them",
      fmt::join(paths, ", ")));
}

int report_with(ReportFlags& flags) {
  if (flags.out.empty()) flags.out = default_out(flags.results.front());
  const std::string error = writable_file()(flags.out);
  if (!error.empty()) throw CLI::ValidationError("--out", error);
  check_results(flags.results);
  const int64_t bytes = write_report(flags.results, flags.out, flags.options);
  std::cout << flags.out << ", " << format_bytes(bytes) << std::endl;
  if (!flags.plots.empty()) {
    const int64_t saved = save_plots(flags.out, flags.plots, flags.browser);
    std::cout << flags.plots << ", " << saved << " plots as SVG, PNG and CSV"
              << std::endl;
  }
  return 0;
}

}  // namespace

void add_report(CLI::App& app, Action& action) {
  auto flags = std::make_shared<ReportFlags>();
  CLI::App* report = app.add_subcommand(
      "report", "Make one page of what studies have found, from results alone");
  set_check(report
                ->add_option("results", flags->results,
                             "Directories of studies, or .jsonl files; several "
                             "are read together")
                ->required()
                ->type_name("DIR|FILE"),
            readable_results());
  set_check(report
                ->add_option("-o,--out", flags->out,
                             "Path of the page (default: report.html in the "
                             "first directory)")
                ->type_name("FILE"),
            not_empty());
  set_check(report
                ->add_option("--plots", flags->plots,
                             "Also save every plot as SVG and PNG in this "
                             "directory, with Chromium")
                ->type_name("DIR"),
            writable_directory());
  report
      ->add_option("--browser", flags->browser,
                   "Chromium's or Chrome's command; default: the first found")
      ->type_name("COMMAND");
  set_check(report
                ->add_option("--page", flags->options.page,
                             "A page that scripts/page.sh made, instead of the "
                             "one built in; also: REPRISE_PAGE")
                ->type_name("FILE"),
            readable_file());
  report->footer(
      std::string(
          "The page needs nothing but itself: no network, no server.\n") +
      kStatuses);
  report->callback(
      [flags, &action] { action = [flags] { return report_with(*flags); }; });
}

}  // namespace reprise::command
