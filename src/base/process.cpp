#include "base/process.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace reprise {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMostOut = 64 << 20;
constexpr size_t kMostError = 16 << 10;
constexpr int kPollMs = 50;
constexpr double kGraceS = 3;  // between SIGTERM and SIGKILL

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Most that a process has had in memory since its program was started. Not what
/// wait4 says: that counts the parent's memory too, which the child had between
/// fork and exec.
int64_t resident_peak(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/status");
  std::string name;
  while (file >> name) {
    int64_t kilobytes = 0;
    if (name == "VmHWM:" && file >> kilobytes) return kilobytes * 1024;
  }
  return 0;  // it is over
}

/// How often the kernel has killed for memory; of this machine, or of this
/// container where that counts by itself.
int64_t memory_kills() {
  for (const char* path : {"/sys/fs/cgroup/memory.events", "/proc/vmstat"}) {
    std::ifstream file(path);
    std::string name;
    int64_t count = 0;
    while (file >> name >> count) {
      if (name == "oom_kill") return count;
    }
  }
  return 0;
}

std::string quoted(const std::string& word) {
  const bool plain =
      !word.empty() && word.find_first_not_of(
                           "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW"
                           "XYZ0123456789-_=./:,+") == std::string::npos;
  if (plain) return word;
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? "'\\''" : std::string(1, c);
  return text + "'";
}

struct Pipe {
  Pipe() {
    TORCH_CHECK(pipe2(ends.data(), O_CLOEXEC) == 0,
                "[study] no pipe: ", std::strerror(errno));
  }
  ~Pipe() {
    for (const int end : ends) {
      if (end >= 0) close(end);
    }
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  void close_end(int which) {
    close(ends[static_cast<size_t>(which)]);
    ends[static_cast<size_t>(which)] = -1;
  }
  std::array<int, 2> ends{-1, -1};
};

void write_short(const char* path, const char* text) {
  const int file = open(path, O_WRONLY | O_CLOEXEC);
  if (file < 0) return;
  const ssize_t written = write(file, text, std::strlen(text));
  static_cast<void>(written);  // a wish only
  close(file);
}

/// In the child, between fork and exec: only calls that are safe there.
[[noreturn]] void become(char* const* argv, const Pipe& out, const Pipe& error,
                         const Pipe& failure, int64_t memory_limit,
                         pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);  // it died before that
  setpgid(0, 0);  // an interrupt at the terminal is the parent's to handle
  const int nothing = open("/dev/null", O_RDONLY);
  dup2(nothing, STDIN_FILENO);
  dup2(out.ends[1], STDOUT_FILENO);
  dup2(error.ends[1], STDERR_FILENO);
  // Where memory runs out, this process goes first.
  write_short("/proc/self/oom_score_adj", "1000");
  if (memory_limit > 0) {
    const rlimit limit{static_cast<rlim_t>(memory_limit),
                       static_cast<rlim_t>(memory_limit)};
    setrlimit(RLIMIT_DATA, &limit);
  }
  for (const int number : {SIGINT, SIGTERM, SIGPIPE}) {
    std::signal(number, SIG_DFL);
  }
  execv(argv[0], argv);
  const int why = errno;
  const ssize_t written = write(failure.ends[1], &why, sizeof why);
  static_cast<void>(written);
  _exit(127);
}

class Child {
 public:
  Child(const std::vector<std::string>& argv, const ProcessOptions& options)
      : options_(options), start_(Clock::now()), kills_(memory_kills()) {
    std::vector<char*> pointers;
    for (const auto& word : argv) {
      pointers.push_back(const_cast<char*>(word.c_str()));
    }
    pointers.push_back(nullptr);
    const pid_t parent = getpid();
    pid_ = fork();
    TORCH_CHECK(pid_ >= 0,
                "[study] cannot start a process: ", std::strerror(errno));
    if (pid_ == 0) {
      become(pointers.data(), out_, error_, failure_, options.memory_limit,
             parent);
    }
    for (Pipe* pipe : {&out_, &error_, &failure_}) pipe->close_end(1);
    int why = 0;
    if (read(failure_.ends[0], &why, sizeof why) == sizeof why) {
      waitpid(pid_, nullptr, 0);
      TORCH_CHECK(false, "[study] cannot run ", argv.at(0), ": ",
                  std::strerror(why));
    }
  }

  ProcessResult wait() {
    bool open_out = true;
    bool open_error = true;
    while (open_out || open_error) {
      std::array<pollfd, 2> polls{
          pollfd{open_out ? out_.ends[0] : -1, POLLIN, 0},
          {open_error ? error_.ends[0] : -1, POLLIN, 0}};
      poll(polls.data(), polls.size(), kPollMs);
      look_at_memory();
      if (polls[0].revents != 0) {
        open_out = take(out_.ends[0], result_.out, kMostOut, /*tail=*/false);
      }
      if (polls[1].revents != 0) {
        open_error = take(error_.ends[0], result_.error, kMostError, true);
      }
      end_if_due();
    }
    int status = 0;
    while (waitpid(pid_, &status, WNOHANG) == 0) {
      usleep(kPollMs * 1000 / 5);
      look_at_memory();
      end_if_due();
    }
    result_.wall_s = since(start_);
    if (WIFEXITED(status)) result_.status = WEXITSTATUS(status);
    if (WIFSIGNALED(status)) result_.signal = WTERMSIG(status);
    result_.killed_for_memory =
        result_.signal == SIGKILL && !ending_ && memory_kills() > kills_;
    return std::move(result_);
  }

 private:
  void look_at_memory() {
    result_.rss_peak_bytes =
        std::max(result_.rss_peak_bytes, resident_peak(pid_));
  }

  /// False at the end of the stream.
  static bool take(int file, std::string& text, size_t most, bool tail) {
    std::array<char, 1 << 16> buffer;
    const ssize_t n = read(file, buffer.data(), buffer.size());
    if (n < 0) return errno == EINTR || errno == EAGAIN;
    if (n == 0) return false;
    if (tail || text.size() < most) {
      text.append(buffer.data(), static_cast<size_t>(n));
    }
    if (tail && text.size() > 2 * most) text.erase(0, text.size() - most);
    return true;
  }

  void end_if_due() {
    if (!ending_) {
      result_.stopped = options_.stop && options_.stop();
      result_.timed_out =
          options_.timeout_s > 0 && since(start_) > options_.timeout_s;
      if (!result_.stopped && !result_.timed_out) return;
      ending_ = true;
      asked_at_ = Clock::now();
      kill(-pid_, SIGTERM);
    } else if (since(asked_at_) > kGraceS) {
      kill(-pid_, SIGKILL);
    }
  }

  const ProcessOptions& options_;
  Pipe out_, error_, failure_;
  Clock::time_point start_, asked_at_;
  int64_t kills_;
  pid_t pid_ = -1;
  bool ending_ = false;
  ProcessResult result_;
};

}  // namespace

std::string last_line(const std::string& text) {
  const size_t end = text.find_last_not_of(" \n\r\t");
  if (end == std::string::npos) return {};
  const size_t start = text.find_last_of("\n\r", end);
  return text.substr(start == std::string::npos ? 0 : start + 1,
                     end - (start == std::string::npos ? 0 : start + 1) + 1);
}

std::string shell_line(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) {
    if (!text.empty()) text += ' ';
    text += quoted(word);
  }
  return text;
}

ProcessResult run_process(const std::vector<std::string>& argv,
                          const ProcessOptions& options) {
  TORCH_CHECK(!argv.empty(), "[study] expected a program to run, got none");
  return Child(argv, options).wait();
}

}  // namespace reprise
