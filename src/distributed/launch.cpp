#include "base/process.h"
#include "distributed/rank_token.h"

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
#include <sys/socket.h>
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

/// Records SIGINT, SIGTERM and, unless it is ignored, SIGHUP instead of ending this process.
class NotedSignals {
 public:
  NotedSignals() {
    signal_to_forward = 0;
    struct sigaction action {};
    action.sa_handler = note_signal;
    sigaction(SIGINT, &action, &interrupt_);
    sigaction(SIGTERM, &action, &terminate_);
    sigaction(SIGHUP, &action, &hang_up_);
    if (hang_up_.sa_handler == SIG_IGN) sigaction(SIGHUP, &hang_up_, nullptr);
  }
  ~NotedSignals() {
    sigaction(SIGINT, &interrupt_, nullptr);
    sigaction(SIGTERM, &terminate_, nullptr);
    sigaction(SIGHUP, &hang_up_, nullptr);
  }
  NotedSignals(const NotedSignals&) = delete;
  NotedSignals& operator=(const NotedSignals&) = delete;

 private:
  struct sigaction interrupt_ {
  }, terminate_{}, hang_up_{};
};

/// This process's environment with the variables of one rank.
std::vector<std::string> environment(int rank, int ranks, int port,
                                     const std::string& token) {
  const std::vector<std::pair<std::string, std::string>> own = {
      {"RANK", std::to_string(rank)},
      {"WORLD_SIZE", std::to_string(ranks)},
      {"LOCAL_RANK", std::to_string(rank)},
      {"LOCAL_WORLD_SIZE", std::to_string(ranks)},
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", std::to_string(port)},
      {"REPRISE_RANK_PORT", ""},
      {detail::kTokenVariable, token},
      {"TORCHELASTIC_USE_AGENT_STORE", "False"}};
  std::vector<std::string> list;
  for (char** at = environ; *at != nullptr; ++at) {
    const std::string text = *at;
    const std::string name = text.substr(0, text.find('='));
    const bool replaced = std::any_of(
        own.begin(), own.end(), [&](const auto& v) { return v.first == name; });
    if (!replaced) list.push_back(text);
  }
  for (const auto& [name, value] : own) list.push_back(name + "=" + value);
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    list.push_back(
        fmt::format("OMP_NUM_THREADS={}", std::max(1, cores / ranks)));
  }
  return list;
}

class Ranks {
 public:
  explicit Ranks(const LaunchOptions& options) : options_(options) {
    const int port = free_port();
    const std::string token = detail::new_rank_token();
    for (int rank = 0; rank < options.ranks; ++rank) {
      ranks_.emplace_back(options.argv,
                          ChildOptions{.environment = environment(
                                           rank, options.ranks, port, token)});
    }
  }

  int wait() {
    while (running() > 0) {
      if (const int number = signal_to_forward.exchange(0)) {
        forwarded_ = number;
        for (const ChildProcess& rank : ranks_) rank.send(number);
      }
      for (size_t rank = 0; rank < ranks_.size(); ++rank) check(rank);
      if (failed_) kill_overdue();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return status_;
  }

 private:
  int64_t running() const {
    return std::count_if(
        ranks_.begin(), ranks_.end(),
        [](const ChildProcess& rank) { return !rank.ended(); });
  }

  /// A suspended rank cannot end by itself.
  void kill_overdue() {
    for (const ChildProcess& rank : ranks_) {
      if (rank.suspended() || Clock::now() > end_by_) rank.send(SIGKILL);
    }
  }

  void check(size_t rank) {
    if (ranks_[rank].ended()) return;
    const auto end = ranks_[rank].poll();
    if (!end || end->status == 0 || failed_) return;
    constexpr int kShell = 128;  // a shell adds this to a signal's number
    const int code = end->signal == 0 ? end->status : kShell + end->signal;
    if (forwarded_ != 0 && code == kShell + forwarded_) {
      status_ = code;
      return;
    }
    failed_ = true;
    status_ = end->signal == 0 ? end->status : 1;
    end_by_ = Clock::now() + std::chrono::milliseconds(
                                 static_cast<int64_t>(1000 * options_.grace_s));
    if (!options_.say) return;
    const std::string how =
        end->signal == 0 ? fmt::format("ended with status {}", end->status)
                         : fmt::format("was ended by signal {} ({})",
                                       end->signal, strsignal(end->signal));
    options_.say(fmt::format("rank {} {}{}", rank, how,
                             running() > 0 ? "; the others end with it" : ""));
  }

  const LaunchOptions& options_;
  std::vector<ChildProcess> ranks_;
  bool failed_ = false;
  int forwarded_ = 0;  // last signal that was forwarded
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
