#pragma once

#include <cstdint>
#include <string>
#include <vector>

/// The page of a study: one HTML file made from results alone, which needs
/// nothing but itself.
namespace reprise {

struct ReportOptions {
  /// A page without results, as scripts/page.sh makes it. Empty: the one that the
  /// environment's REPRISE_PAGE names, else the one that was built in.
  std::string page;
  /// Most points that the observers' series have in the page, all runs together;
  /// longer ones are thinned, the highest memory of each group stays.
  int64_t series_points = 45000;
};

/// The page of all results in `paths` (as read_results() takes them), as HTML.
/// Throws c10::Error where results cannot be read, or where this build has no
/// page and `options.page` names none.
std::string make_report(const std::vector<std::string>& paths,
                        const ReportOptions& options = {});

/// Writes it to `file`, whole or not at all. Returns its size in bytes.
int64_t write_report(const std::vector<std::string>& paths,
                     const std::string& file,
                     const ReportOptions& options = {});

/// Saves every plot of the page in the file `report` as NAME.svg and NAME.png
/// in `directory`, which is made where it is missing. `browser`: Chromium's or
/// Chrome's command; empty: the first that is found. Returns how many plots were
/// saved. Throws c10::Error where there is no browser or it fails.
int64_t save_plots(const std::string& report, const std::string& directory,
                   const std::string& browser = "");

}  // namespace reprise
