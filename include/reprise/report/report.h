#pragma once

#include <cstdint>
#include <string>
#include <vector>

/// The page of a study: one self-contained HTML file made from results alone.
namespace reprise {

struct ReportOptions {
  /// A page without results, as scripts/page.sh makes it. Empty: the one named by
  /// the environment variable REPRISE_PAGE, else the built-in one.
  std::string page;
  /// Most points of the observers' series in the page, all runs together. Longer
  /// series are thinned; the point with the highest memory of each group stays.
  int64_t series_points = 45000;
};

/// The page of all results in `paths` (as read_results() takes them), as HTML.
/// Directories of one study are its parts, unless two of them have the same run on the
/// same device: those stay apart.
/// Throws reprise::Error if a file cannot be read, and c10::Error if it holds no results,
/// or if this build has no page and `options.page` names none.
std::string make_report(const std::vector<std::string>& paths,
                        const ReportOptions& options = {});

/// Writes it to `file`, whole or not at all. Returns its size in bytes.
int64_t write_report(const std::vector<std::string>& paths,
                     const std::string& file,
                     const ReportOptions& options = {});

/// Saves every plot of the page in the file `report` as NAME.svg, NAME.png and
/// NAME.csv in `directory`, which is created if it is missing. `browser`:
/// Chromium's or Chrome's command; empty: the first that is found. Returns how
/// many plots were saved. Throws c10::Error if there is no browser or it fails, and
/// reprise::Error if a file cannot be read or written.
int64_t save_plots(const std::string& report, const std::string& directory,
                   const std::string& browser = "");

}  // namespace reprise
