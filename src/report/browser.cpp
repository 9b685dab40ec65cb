#include "report/browser.h"

#include <c10/util/Exception.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <ftw.h>
#include <poll.h>
#include <spawn.h>
#include <sstream>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

extern char** environ;

namespace reprise::detail {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kPatience(180);

bool is_command(const std::string& path) {
  return access(path.c_str(), X_OK) == 0 && !fs::is_directory(path);
}

/// The command in PATH, or `name` itself if it is a path; empty if there is none.
std::string which(const std::string& name) {
  if (name.find('/') != std::string::npos) return is_command(name) ? name : "";
  const char* path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "/usr/bin:/bin" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string command = (fs::path(folder) / name).string();
    if (is_command(command)) return command;
  }
  return "";
}

/// A directory that is gone with this object.
class Scratch {
 public:
  Scratch() {
    TORCH_CHECK(mkdtemp(path_.data()) != nullptr,
                "[report] cannot make a directory like ", path_, ": ",
                std::strerror(errno));
  }
  ~Scratch() {
    // std::filesystem::remove_all is not to be used, see docs/design.md.
    nftw(
        path_.c_str(),
        [](const char* path, const struct stat*, int, FTW*) {
          return std::remove(path), 0;
        },
        16, FTW_DEPTH | FTW_PHYS);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_ =
      (fs::temp_directory_path() / "reprise-report-XXXXXX").string();
};

struct Started {
  pid_t process = -1;
  int output = -1;
};

/// In a process group of its own, with its standard output in a pipe.
Started start(const std::vector<std::string>& words) {
  std::array<int, 2> ends{};
  TORCH_CHECK(pipe2(ends.data(), O_CLOEXEC) == 0,
              "[report] no pipe: ", std::strerror(errno));
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&files, ends[1], 1);
  posix_spawn_file_actions_addopen(&files, 2, "/dev/null", O_WRONLY, 0);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  std::vector<char*> arguments;
  for (const std::string& word : words) {
    arguments.push_back(const_cast<char*>(word.c_str()));
  }
  arguments.push_back(nullptr);
  Started started;
  const int failed = posix_spawn(&started.process, words[0].c_str(), &files,
                                 &attributes, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&files);
  posix_spawnattr_destroy(&attributes);
  close(ends[1]);
  if (failed != 0) close(ends[0]);
  TORCH_CHECK(failed == 0, "[report] cannot start ", words[0], ": ",
              std::strerror(failed));
  started.output = ends[0];
  return started;
}

/// All that comes until the end or the deadline; false at the deadline.
bool read_until(int file, Clock::time_point deadline, std::string& text) {
  std::array<char, 1 << 16> part;
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - Clock::now());
    if (left.count() <= 0) return false;
    pollfd waiting{file, POLLIN, 0};
    if (poll(&waiting, 1, static_cast<int>(left.count())) <= 0) continue;
    const ssize_t got = read(file, part.data(), part.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return true;
    text.append(part.data(), static_cast<size_t>(got));
  }
}

}  // namespace

std::string find_browser(const std::string& named) {
  if (!named.empty()) {
    const std::string found = which(named);
    TORCH_CHECK(!found.empty(), "[report] ", named, " is no command");
    return found;
  }
  for (const char* name :
       {"chromium", "chromium-browser", "google-chrome", "chrome"}) {
    const std::string found = which(name);
    if (!found.empty()) return found;
  }
  TORCH_CHECK(false,
              "[report] plots are saved with Chromium, which is not here; on "
              "Debian: apt-get install chromium, or name one with --browser");
}

std::string dump_document(const std::string& browser, const std::string& url) {
  const Scratch profile;
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
  // Chromium's sandbox refuses to run as root; the page is one of ours.
  if (geteuid() == 0) words.insert(words.begin() + 1, "--no-sandbox");
  const Started started = start(words);
  std::string text;
  const bool ended = read_until(started.output, Clock::now() + kPatience, text);
  close(started.output);
  if (!ended) kill(-started.process, SIGKILL);
  int status = 0;
  while (waitpid(started.process, &status, 0) < 0 && errno == EINTR) {
  }
  TORCH_CHECK(ended, "[report] ", browser, " did not end in ",
              kPatience.count(), " s");
  TORCH_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "[report] ",
              browser, " failed on ", url);
  return text;
}

}  // namespace reprise::detail
