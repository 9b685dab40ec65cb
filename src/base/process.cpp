#include "base/process.h"

#include "base/file.h"
#include "base/memory_limit.h"
#include "base/throw_error.h"

#include <algorithm>
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
#include <utility>

extern char** environ;

namespace reprise {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kErrorLimit = 16 << 10;
constexpr int kPollMs = 50;
constexpr double kGraceS = 3;  // between SIGTERM and SIGKILL

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Peak resident memory of a process since its program was loaded. wait4() would also
/// count the parent's memory, which the child shares between fork and exec.
int64_t resident_peak(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/status");
  std::string name;
  while (file >> name) {
    int64_t kilobytes = 0;
    if (name == "VmHWM:" && file >> kilobytes) return kilobytes * 1024;
  }
  return 0;  // the process has ended
}

/// Number of processes that the kernel has killed because memory ran out: in this
/// container if it has its own count, otherwise on this machine.
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
    if (pipe2(ends.data(), O_CLOEXEC) != 0) {
      detail::throw_error("[process] no pipe: {}", detail::system_reason());
    }
  }
  ~Pipe() {
    close_end(0);
    close_end(1);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  void close_end(size_t which) {
    if (ends[which] >= 0) close(ends[which]);
    ends[which] = -1;
  }
  std::array<int, 2> ends{-1, -1};  // to read, to write
};

/// Pointers for exec; valid as long as `words`.
std::vector<char*> pointers_to(const std::vector<std::string>& words) {
  std::vector<char*> pointers;
  for (const auto& word : words) {
    pointers.push_back(const_cast<char*>(word.c_str()));
  }
  pointers.push_back(nullptr);
  return pointers;
}

/// What the child needs between fork and exec, prepared before the fork.
struct Launch {
  char* const* argv;
  char* const* environment;
  const ChildOptions* options;
  int output;   // write ends of pipes, or -1
  int error;    //
  int failure;  // gets errno if exec fails
  pid_t parent;
};

// The functions below run in the child between fork and exec, where only
// async-signal-safe calls are allowed.

void redirect(int stream, ChildStream to, int pipe_end) {
  if (to == ChildStream::kPipe) dup2(pipe_end, stream);
  if (to != ChildStream::kNull) return;
  const int null = open("/dev/null", O_RDWR);
  if (null == stream) return;
  dup2(null, stream);
  close(null);
}

void prefer_to_be_killed() {
  const int file = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
  if (file < 0) return;
  write_all(file, "1000", 4);  // if it fails, the kernel chooses by size
  close(file);
}

[[noreturn]] void become(const Launch& launch) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != launch.parent) _exit(127);  // it died before prctl()
  setpgid(0, 0);
  redirect(STDIN_FILENO, launch.options->input, -1);
  redirect(STDOUT_FILENO, launch.options->output, launch.output);
  redirect(STDERR_FILENO, launch.options->error, launch.error);
  if (launch.options->first_to_kill) prefer_to_be_killed();
  if (const int64_t bytes = launch.options->memory_limit; bytes > 0) {
    const rlimit limit{static_cast<rlim_t>(bytes), static_cast<rlim_t>(bytes)};
    setrlimit(RLIMIT_DATA, &limit);
  }
  for (const int number : {SIGINT, SIGTERM, SIGPIPE}) {
    std::signal(number, SIG_DFL);
  }
  execve(launch.argv[0], launch.argv, launch.environment);
  const int reason = errno;
  write_all(launch.failure, &reason, sizeof reason);
  _exit(127);
}

}  // namespace

ChildProcess::ChildProcess(const std::vector<std::string>& argv,
                           const ChildOptions& options) {
  if (argv.empty()) {
    detail::throw_error("[process] expected a program to run, got none");
  }
  const std::vector<char*> arguments = pointers_to(argv);
  std::vector<char*> variables;
  if (options.environment) variables = pointers_to(*options.environment);
  std::array<std::optional<Pipe>, 2> pipes;
  if (options.output == ChildStream::kPipe) pipes[0].emplace();
  if (options.error == ChildStream::kPipe) pipes[1].emplace();
  Pipe failure;
  const Launch launch{arguments.data(),
                      options.environment ? variables.data() : environ,
                      &options,
                      pipes[0] ? pipes[0]->ends[1] : -1,
                      pipes[1] ? pipes[1]->ends[1] : -1,
                      failure.ends[1],
                      getpid()};
  pid_ = fork();
  if (pid_ < 0) {
    detail::throw_error("[process] cannot start a process: {}",
                        detail::system_reason());
  }
  if (pid_ == 0) become(launch);
  failure.close_end(1);
  int reason = 0;
  ssize_t got = 0;
  do {
    got = read(failure.ends[0], &reason, sizeof reason);
  } while (got < 0 && errno == EINTR);
  if (got == sizeof reason) {
    waitpid(pid_, nullptr, 0);
    detail::throw_error("[process] cannot run {}: {}", argv[0],
                        detail::system_reason(reason));
  }
  for (size_t i = 0; i < pipes.size(); ++i) {
    if (pipes[i]) pipes_[i] = std::exchange(pipes[i]->ends[0], -1);
  }
}

ChildProcess::~ChildProcess() {
  if (pid_ > 0 && !end_) {
    send_to_group(SIGKILL);
    while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  for (const int file : pipes_) {
    if (file >= 0) close(file);
  }
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      pipes_(std::exchange(other.pipes_, {-1, -1})),
      end_(other.end_),
      suspended_(other.suspended_) {}

const std::optional<ProcessEnd>& ChildProcess::poll() {
  int status = 0;
  const int events = WNOHANG | WUNTRACED | WCONTINUED;
  if (end_ || waitpid(pid_, &status, events) != pid_) return end_;
  suspended_ = WIFSTOPPED(status);
  if (WIFEXITED(status)) end_ = ProcessEnd{WEXITSTATUS(status), 0};
  if (WIFSIGNALED(status)) end_ = ProcessEnd{-1, WTERMSIG(status)};
  return end_;
}

void ChildProcess::send(int signal) const {
  if (!end_) kill(pid_, signal);
}

void ChildProcess::send_to_group(int signal) const {
  if (!end_) kill(-pid_, signal);
}

namespace {

/// The parent's environment, with a limit that the program applies; nullopt: as it is.
std::optional<std::vector<std::string>> environment_of(
    const ProcessOptions& options) {
  if (!options.limits_itself) return std::nullopt;
  const std::string name = std::string(kMemoryLimitVariable) + "=";
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text(*variable);
    if (!text.starts_with(name)) variables.emplace_back(text);
  }
  if (options.memory_limit > 0) {
    variables.push_back(name + std::to_string(options.memory_limit));
  }
  return variables;
}

/// Runs one program to its end; see run_process().
class ProcessRun {
 public:
  ProcessRun(const std::vector<std::string>& argv,
             const ProcessOptions& options)
      : options_(options),
        start_(Clock::now()),
        kills_(memory_kills()),
        child_(argv, {.input = ChildStream::kNull,
                      .output = ChildStream::kPipe,
                      .error = options.discard_error ? ChildStream::kNull
                                                     : ChildStream::kPipe,
                      .environment = environment_of(options),
                      .memory_limit =
                          options.limits_itself ? 0 : options.memory_limit,
                      .first_to_kill = true}) {}

  ProcessResult wait() {
    std::array<pollfd, 2> streams{pollfd{child_.output(), POLLIN, 0},
                                  {child_.error(), POLLIN, 0}};
    while (streams[0].fd >= 0 || streams[1].fd >= 0) {
      ::poll(streams.data(), streams.size(), kPollMs);
      sample_memory();
      if (streams[0].revents != 0 && !read_output()) streams[0].fd = -1;
      if (streams[1].revents != 0 && !read_error()) streams[1].fd = -1;
      end_if_due();
    }
    while (!child_.poll()) {
      usleep(kPollMs * 1000 / 5);
      sample_memory();
      end_if_due();
    }
    result_.wall_s = seconds_since(start_);
    result_.status = child_.poll()->status;
    result_.signal = child_.poll()->signal;
    result_.killed_for_memory =
        result_.signal == SIGKILL && !ending_ && memory_kills() > kills_;
    return std::move(result_);
  }

 private:
  void sample_memory() {
    result_.rss_peak_bytes =
        std::max(result_.rss_peak_bytes, resident_peak(child_.pid()));
  }

  /// The next part of a stream; empty but present after an interrupted call, nullopt at
  /// the end of the stream.
  static std::optional<std::string> read_part(int file) {
    std::string part(1 << 16, '\0');
    const ssize_t got = read(file, part.data(), part.size());
    if (got == 0) return std::nullopt;
    if (got < 0 && errno != EINTR && errno != EAGAIN) return std::nullopt;
    part.resize(got > 0 ? static_cast<size_t>(got) : 0);
    return part;
  }

  bool read_output() {
    const auto part = read_part(child_.output());
    if (part && result_.out.size() < options_.output_limit) {
      result_.out += *part;
    }
    return part.has_value();
  }

  bool read_error() {
    const auto part = read_part(child_.error());
    std::string& text = result_.error;
    if (part) text += *part;
    if (text.size() > 2 * kErrorLimit) {
      text.erase(0, text.size() - kErrorLimit);
    }
    return part.has_value();
  }

  void end_if_due() {
    if (!ending_) {
      result_.stopped = options_.stop && options_.stop();
      result_.timed_out =
          options_.timeout_s > 0 && seconds_since(start_) > options_.timeout_s;
      if (!result_.stopped && !result_.timed_out) return;
      ending_ = true;
      asked_at_ = Clock::now();
      child_.send_to_group(SIGTERM);
    } else if (seconds_since(asked_at_) > kGraceS) {
      child_.send_to_group(SIGKILL);
    }
  }

  const ProcessOptions& options_;
  Clock::time_point start_, asked_at_;
  int64_t kills_;
  ChildProcess child_;
  bool ending_ = false;
  ProcessResult result_;
};

}  // namespace

ProcessResult run_process(const std::vector<std::string>& argv,
                          const ProcessOptions& options) {
  return ProcessRun(argv, options).wait();
}

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

}  // namespace reprise
