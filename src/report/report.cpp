#include "base/file.h"
#include "base/json_text.h"
#include "report/page.h"

#include <reprise/report/report.h>
#include <reprise/study/runner.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <filesystem>

namespace reprise {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr size_t kFewestPoints = 30;

/// Whether the text is a complete page. The source in web/ has the placeholder too, but
/// its libraries are not included yet.
bool is_page(const std::string& text) {
  return text.find(detail::kResultsPlaceholder) != std::string::npos &&
         text.find("\n@library ") == std::string::npos;
}

std::string page_of(const ReportOptions& options) {
  const char* variable = std::getenv("REPRISE_PAGE");
  const std::string named = !options.page.empty() ? options.page
                            : variable != nullptr ? variable
                                                  : "";
  if (named.empty()) {
    std::string page(detail::built_in_page());
    TORCH_CHECK(
        is_page(page), "[report] this build has no page template: ",
        page.substr(0, page.find('\n')),
        "; build one with scripts/page.sh on a machine with network access, "
        "and name it with --page or REPRISE_PAGE");
    return page;
  }
  std::string page = read_text(named);
  TORCH_CHECK(is_page(page),
              "[report] expected a page built by scripts/page.sh, got ", named);
  return page;
}

/// The absolute directory of the results in `path`.
std::string directory_of(const std::string& path) {
  std::string text = fs::absolute(path).string();
  for (const std::string end : {"/results.jsonl", "/.", "/"}) {
    while (text.size() > end.size() && text.ends_with(end)) {
      text.resize(text.size() - end.size());
    }
  }
  return text;
}

std::string last_part(const std::string& path) {
  return path.substr(path.rfind('/') + 1);
}

/// The name of the directory of `path` in the page: its last component, or the whole
/// path if several directories have the same last component.
std::string source_of(const std::string& path,
                      const std::vector<std::string>& paths) {
  const std::string mine = directory_of(path);
  const bool is_alone =
      std::none_of(paths.begin(), paths.end(), [&](const std::string& other) {
        const std::string theirs = directory_of(other);
        return theirs != mine && last_part(theirs) == last_part(mine);
      });
  return is_alone ? last_part(mine) : mine;
}

/// All records in `paths`, each with the name of its directory in the key `source`.
std::vector<ordered_json> records_of(const std::vector<std::string>& paths) {
  std::vector<ordered_json> records;
  for (const std::string& path : paths) {
    const std::string source = source_of(path, paths);
    for (const std::string& line : read_results({path})) {
      records.push_back(parse_json<ordered_json>(line));
      records.back()["source"] = source;
    }
  }
  return records;
}

/// The current time in UTC, in ISO 8601 format.
std::string now() {
  const std::time_t seconds = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&seconds, &parts);
  std::string text(32, '\0');
  text.resize(
      std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &parts));
  return text;
}

/// The number of points of a run that are merged into one.
size_t group_size(size_t points, size_t most) {
  return (points + most - 1) / most;
}

/// Keeps the point with the highest memory of each group, so that peaks remain.
std::vector<size_t> chosen_points(const ordered_json& series, size_t most) {
  const size_t points = series["t_s"].size();
  const size_t group = group_size(points, most);
  const auto memory = series.find("memory_bytes");
  const auto height = [&](size_t i) {
    const bool known = memory != series.end() && memory->is_array() &&
                       i < memory->size() && (*memory)[i].is_number();
    return known ? (*memory)[i].get<double>() : 0.0;
  };
  std::vector<size_t> chosen;
  for (size_t from = 0; from < points; from += group) {
    size_t best = from;
    for (size_t i = from; i < std::min(points, from + group); ++i) {
      if (height(i) > height(best)) best = i;
    }
    chosen.push_back(best);
  }
  return chosen;
}

bool has_series(const ordered_json& record) {
  const auto series = record.find("series");
  return series != record.end() && series->is_object() &&
         series->contains("t_s") && (*series)["t_s"].is_array();
}

void thin(ordered_json& series, size_t most) {
  if (series["t_s"].size() <= most) return;
  const auto chosen = chosen_points(series, most);
  for (auto& [name, values] : series.items()) {
    if (!values.is_array()) continue;
    ordered_json fewer = ordered_json::array();
    for (const size_t i : chosen) {
      fewer.push_back(i < values.size() ? values[i] : ordered_json());
    }
    values = std::move(fewer);
  }
}

/// Serializes JSON for use in a <script> element.
std::string in_script(const std::string& json) {
  std::string text;
  text.reserve(json.size() + json.size() / 64);
  for (const char c : json) {
    if (c == '<') {
      text += "\\u003c";
    } else {
      text += c;
    }
  }
  return text;
}

}  // namespace

std::string make_report(const std::vector<std::string>& paths,
                        const ReportOptions& options) {
  TORCH_CHECK(!paths.empty(), "[report] expected results, got no path");
  std::string page = page_of(options);
  std::vector<ordered_json> records = records_of(paths);
  const auto series = static_cast<size_t>(
      std::count_if(records.begin(), records.end(), has_series));
  const size_t most =
      std::max(kFewestPoints, static_cast<size_t>(options.series_points) /
                                  std::max<size_t>(series, 1));
  for (ordered_json& record : records) {
    if (has_series(record)) thin(record["series"], most);
  }
  ordered_json all;
  all["made"] = now();
  all["records"] = std::move(records);
  page.replace(page.find(detail::kResultsPlaceholder),
               detail::kResultsPlaceholder.size(),
               in_script(all.dump(-1, ' ', false,
                                  ordered_json::error_handler_t::replace)));
  return page;
}

int64_t write_report(const std::vector<std::string>& paths,
                     const std::string& file, const ReportOptions& options) {
  const std::string page = make_report(paths, options);
  AtomicFile out(file);
  out.write(page);
  out.commit();
  return static_cast<int64_t>(page.size());
}

}  // namespace reprise
