#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace reprise {

struct ReportOptions {
  /// Path of a page template built by scripts/page.sh. If empty, the file named by the
  /// environment variable REPRISE_PAGE is used, or else the built-in template.
  std::string page;
  /// Maximum number of points of all observer series in the page. Longer series are
  /// downsampled; of each group of points, the one with the highest memory is kept.
  int64_t series_points = 45000;
};

/// Returns a self-contained HTML page with the results in `paths` (see read_results()).
/// Directories of the same study are shown together, unless two of them contain the
/// same run on the same device. Throws c10::Error if results cannot be read, or if this
/// build has no page template and `options.page` is empty.
std::string make_report(const std::vector<std::string>& paths,
                        const ReportOptions& options = {});

/// Writes the page to `file` atomically. Returns its size in bytes.
int64_t write_report(const std::vector<std::string>& paths,
                     const std::string& file,
                     const ReportOptions& options = {});

/// Saves every plot of the page `report` as NAME.svg, NAME.png and NAME.csv in
/// `directory`, which is created if it is missing. `browser` is the command of Chromium
/// or Chrome; if empty, the first one found is used. Returns the number of plots.
/// Throws c10::Error if there is no browser or it fails.
int64_t save_plots(const std::string& report, const std::string& directory,
                   const std::string& browser = "");

}  // namespace reprise
