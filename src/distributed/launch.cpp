#include <reprise/distributed/launch.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

extern char** environ;

namespace reprise {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic<int> signal_to_forward = 0;

extern "C" void note_signal(int number) {
  signal_to_forward = number;
}

/// While it lives, signals are noted instead of ending this process.
class NotedSignals {
 public:
  NotedSignals() {
    signal_to_forward = 0;
    struct sigaction action {};
    action.sa_handler = note_signal;
    sigaction(SIGINT, &action, &interrupt_);
    sigaction(SIGTERM, &action, &terminate_);
  }
  ~NotedSignals() {
    sigaction(SIGINT, &interrupt_, nullptr);
    sigaction(SIGTERM, &terminate_, nullptr);
  }
  NotedSignals(const NotedSignals&) = delete;
  NotedSignals& operator=(const NotedSignals&) = delete;

 private:
  struct sigaction interrupt_ {
  }, terminate_{};
};

std::vector<char*> pointers(const std::vector<std::string>& words) {
  std::vector<char*> list;
  for (const auto& word : words)
    list.push_back(const_cast<char*>(word.c_str()));
  list.push_back(nullptr);
  return list;
}

std::vector<std::string> environment(int rank, int ranks, int port) {
  const std::vector<std::pair<std::string, std::string>> own = {
      {"RANK", std::to_string(rank)},
      {"WORLD_SIZE", std::to_string(ranks)},
      {"LOCAL_RANK", std::to_string(rank)},
      {"LOCAL_WORLD_SIZE", std::to_string(ranks)},
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", std::to_string(port)},
      {"TORCHELASTIC_USE_AGENT_STORE", "False"}};
  std::vector<std::string> list;
  for (char** at = environ; *at != nullptr; ++at) {
    const std::string text = *at;
    const std::string name = text.substr(0, text.find('='));
    const bool ours = std::any_of(
        own.begin(), own.end(), [&](const auto& v) { return v.first == name; });
    if (!ours) list.push_back(text);
  }
  for (const auto& [name, value] : own) list.push_back(name + "=" + value);
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    list.push_back(
        fmt::format("OMP_NUM_THREADS={}", std::max(1, cores / ranks)));
  }
  return list;
}

pid_t start(const LaunchOptions& options, int rank, int port) {
  const auto variables = environment(rank, options.ranks, port);
  const auto argv = pointers(options.argv);
  const auto envp = pointers(variables);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  TORCH_CHECK(pid >= 0, "[launch] cannot start rank ", rank, ": ",
              std::strerror(errno));
  if (pid != 0) return pid;
  // Between fork and exec: only calls that are safe there.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);
  setpgid(0, 0);  // an interrupt at the terminal comes through the parent, once
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
  execve(argv[0], argv.data(), envp.data());
  _exit(127);
}

class Ranks {
 public:
  explicit Ranks(const LaunchOptions& options) : options_(options) {
    const int port = free_port();
    for (int rank = 0; rank < options.ranks; ++rank) {
      pids_.push_back(start(options, rank, port));
      stopped_.push_back(false);
    }
  }
  ~Ranks() { send(SIGKILL); }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  int wait() {
    while (left() > 0) {
      if (const int number = signal_to_forward.exchange(0)) {
        forwarded_ = number;
        send(number);
      }
      for (int rank = 0; rank < options_.ranks; ++rank) look(rank);
      if (failed_) end_those_left();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return status_;
  }

 private:
  int64_t left() const {
    return std::count_if(pids_.begin(), pids_.end(),
                         [](pid_t pid) { return pid > 0; });
  }

  void send(int number) {
    for (const pid_t pid : pids_) {
      if (pid > 0) kill(pid, number);
    }
  }

  /// One that is stopped ends by itself no more.
  void end_those_left() {
    for (size_t rank = 0; rank < pids_.size(); ++rank) {
      if (pids_[rank] > 0 && (stopped_[rank] || Clock::now() > end_by_)) {
        kill(pids_[rank], SIGKILL);
      }
    }
  }

  void look(int rank) {
    pid_t& pid = pids_[static_cast<size_t>(rank)];
    int status = 0;
    const int events = WNOHANG | WUNTRACED | WCONTINUED;
    if (pid <= 0 || waitpid(pid, &status, events) != pid) return;
    stopped_[static_cast<size_t>(rank)] = WIFSTOPPED(status);
    if (WIFSTOPPED(status) || WIFCONTINUED(status)) return;
    pid = 0;
    const bool fine = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    if (fine || failed_) return;
    constexpr int kShell = 128;  // what a shell adds to a signal's number
    const int code =
        WIFEXITED(status) ? WEXITSTATUS(status) : kShell + WTERMSIG(status);
    if (forwarded_ != 0 && code == kShell + forwarded_) {
      status_ = code;  // it did as it was told
      return;
    }
    failed_ = true;
    status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
    end_by_ = Clock::now() + std::chrono::milliseconds(
                                 static_cast<int64_t>(1000 * options_.grace_s));
    if (!options_.say) return;
    const std::string how =
        WIFEXITED(status)
            ? fmt::format("ended with status {}", WEXITSTATUS(status))
            : fmt::format("was ended by signal {} ({})", WTERMSIG(status),
                          strsignal(WTERMSIG(status)));
    options_.say(fmt::format("rank {} {}{}", rank, how,
                             left() > 0 ? "; the others end with it" : ""));
  }

  const LaunchOptions& options_;
  std::vector<pid_t> pids_;
  std::vector<bool> stopped_;
  bool failed_ = false;
  int forwarded_ = 0;  // the last signal handed on
  int status_ = 0;
  Clock::time_point end_by_{};
};

}  // namespace

int free_port() {
  const int file = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  TORCH_CHECK(file >= 0, "[launch] no socket: ", std::strerror(errno));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  const bool known =
      bind(file, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
      getsockname(file, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  const int why = errno;
  close(file);
  TORCH_CHECK(known, "[launch] no free port: ", std::strerror(why));
  return ntohs(address.sin_port);
}

int launch_ranks(const LaunchOptions& options) {
  TORCH_CHECK(options.ranks >= 1, "[launch] expected 1 rank or more, got ",
              options.ranks);
  TORCH_CHECK(!options.argv.empty(),
              "[launch] expected a program to run, got none");
  const NotedSignals noted;
  Ranks ranks(options);
  return ranks.wait();
}

}  // namespace reprise
