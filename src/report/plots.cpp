// Tested by tests/report/report_test.cpp.
#include "base/file.h"
#include "report/browser.h"

#include <reprise/report/report.h>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <string_view>

namespace reprise {
namespace {

namespace fs = std::filesystem;

std::string from_base64(std::string_view text) {
  static constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string bytes;
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    const size_t digit = kDigits.find(c);
    if (digit == std::string_view::npos) break;  // padding
    bits = (bits << 6) | static_cast<uint32_t>(digit);
    count += 6;
    if (count >= 8) {
      count -= 8;
      bytes += static_cast<char>((bits >> count) & 0xff);
    }
  }
  return bytes;
}

/// A file:// URL with percent-encoding.
std::string url_of(const std::string& path) {
  static constexpr std::string_view kHex = "0123456789ABCDEF";
  std::string url = "file://";
  for (const char c : fs::absolute(path).string()) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) != 0 ||
        std::string_view("/._-~").find(c) != std::string_view::npos) {
      url += c;
    } else {
      url += {'%', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  return url;
}

/// The plots that the page adds to its document if the URL's fragment is #plots.
nlohmann::json plots_in(const std::string& document) {
  static constexpr std::string_view kBegin =
      R"(<script type="application/json" id="plots">)";
  const size_t begin = document.find(kBegin);
  TORCH_CHECK(begin != std::string::npos,
              "[report] expected a page written by reprise report, got one "
              "without plots");
  const size_t from = begin + kBegin.size();
  const size_t to = document.find("</script>", from);
  return nlohmann::json::parse(document.substr(from, to - from));
}

void write_file(const fs::path& path, const std::string& bytes) {
  AtomicFile file(path.string());
  file.write(bytes);
  file.commit();
}

}  // namespace

int64_t save_plots(const std::string& report, const std::string& directory,
                   const std::string& browser) {
  const std::string document = detail::dump_document(
      detail::find_browser(browser), url_of(report) + "#plots");
  std::error_code error;
  fs::create_directories(directory, error);
  TORCH_CHECK(!error, "[report] cannot make ", directory, ": ",
              error.message());
  int64_t saved = 0;
  for (const auto& plot : plots_in(document)) {
    const std::string name = plot.at("name").get<std::string>();
    const fs::path base = fs::path(directory) / name;
    write_file(base.string() + ".svg", plot.at("svg").get<std::string>());
    write_file(base.string() + ".png",
               from_base64(plot.at("png").get<std::string>()));
    write_file(base.string() + ".csv", plot.at("csv").get<std::string>());
    ++saved;
  }
  return saved;
}

}  // namespace reprise
