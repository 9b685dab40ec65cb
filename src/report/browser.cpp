#include "report/browser.h"

#include "base/paths.h"
#include "base/process.h"

#include <c10/util/Exception.h>

#include <limits>
#include <unistd.h>
#include <vector>

namespace reprise::detail {
namespace {

constexpr int kTimeoutS = 180;

}  // namespace

std::string find_browser(const std::string& named) {
  if (!named.empty()) {
    const std::string found = find_program(named);
    TORCH_CHECK(!found.empty(), "[report] ", named, " is not a command");
    return found;
  }
  for (const char* name :
       {"chromium", "chromium-browser", "google-chrome", "chrome"}) {
    const std::string found = find_program(name);
    if (!found.empty()) return found;
  }
  TORCH_CHECK(false,
              "[report] plots are saved with Chromium, which was not found; on "
              "Debian: apt-get install chromium, or name one with --browser");
}

std::string dump_document(const std::string& browser, const std::string& url) {
  const TemporaryDirectory profile("reprise-report-");
  std::vector<std::string> words = {browser,
                                    "--headless",
                                    "--disable-gpu",
                                    "--disable-dev-shm-usage",
                                    "--no-first-run",
                                    "--disable-background-networking",
                                    "--window-size=1280,900",
                                    "--virtual-time-budget=60000",
                                    "--user-data-dir=" + profile.path(),
                                    "--dump-dom",
                                    url};
  // Chromium's sandbox refuses to run as root. The page is our own.
  if (geteuid() == 0) words.insert(words.begin() + 1, "--no-sandbox");
  // Its diagnostics say nothing about the page, and helper processes that outlive it
  // would keep a pipe open.
  const ProcessResult result =
      run_process(words, {.timeout_s = kTimeoutS,
                          .discard_error = true,
                          .output_limit = std::numeric_limits<size_t>::max()});
  TORCH_CHECK(!result.timed_out, "[report] ", browser, " did not end in ",
              kTimeoutS, " s");
  TORCH_CHECK(result.status == 0, "[report] ", browser, " failed on ", url);
  return result.out;
}

}  // namespace reprise::detail
