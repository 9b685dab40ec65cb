#include "compat/cuda.h"
#include "distributed/failure_detector.h"

#include <reprise/distributed/group.h>
#include <reprise/memory/out_of_memory.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <netdb.h>
#include <optional>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

namespace reprise {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;
using std::chrono::milliseconds;

/// Collectives wait as long as the watch lets them.
constexpr milliseconds kNoLimit = std::chrono::hours(24 * 30);
/// Of a message through the host.
constexpr int64_t kChunkBytes = int64_t{64} << 20;

milliseconds in_ms(double seconds) {
  return milliseconds(static_cast<int64_t>(1000 * seconds));
}

std::string choose_backend(const RankGroupOptions& options) {
  const int devices = compat::cuda_device_count();
  if (options.backend.empty()) {
    return options.device.is_cuda() &&
                   compat::ProcessGroup::available("nccl") &&
                   options.place.local_ranks <= devices
               ? "nccl"
               : "gloo";
  }
  TORCH_CHECK(options.backend == "gloo" || options.backend == "nccl",
              "[--backend] expected gloo or nccl, got '", options.backend, "'");
  TORCH_CHECK(compat::ProcessGroup::available(options.backend),
              "[--backend] this build has no ", options.backend,
              "; build with its headers, or use gloo");
  TORCH_CHECK(options.backend == "gloo" || options.device.is_cuda(),
              "[--backend] nccl needs a CUDA device, got ",
              options.device.str(), "; use gloo");
  return options.backend;
}

void say_and_exit(int rank, const std::string& what) {
  const std::string line =
      fmt::format("reprise: rank {} ends: {}\n", rank, what);
  std::fputs(line.c_str(), stderr);
  std::fflush(stderr);
  std::_Exit(1);
}

/// "rank 2 has model gpt2, rank 0 has bert-base"; empty: no difference.
std::string difference(const json& first, const json& other, int rank) {
  for (const auto& [name, value] : first.items()) {
    const std::string theirs =
        other.contains(name) ? other.at(name).get<std::string>() : "none";
    if (theirs == value.get<std::string>()) continue;
    return fmt::format("rank {} has {} {}, rank 0 has {}", rank, name, theirs,
                       value.get<std::string>());
  }
  return "";
}

/// This machine's address on the way to `host`: where others reach it, whatever its
/// own name resolves to. Empty where that cannot be told.
std::string address_towards(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;  // nothing is sent
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) !=
      0) {
    return "";
  }
  std::string text;
  for (const addrinfo* at = found; at != nullptr && text.empty();
       at = at->ai_next) {
    const int file = socket(at->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (file < 0) continue;
    sockaddr_storage own{};
    socklen_t size = sizeof own;
    char name[NI_MAXHOST];
    if (connect(file, at->ai_addr, at->ai_addrlen) == 0 &&
        getsockname(file, reinterpret_cast<sockaddr*>(&own), &size) == 0 &&
        getnameinfo(reinterpret_cast<sockaddr*>(&own), size, name, sizeof name,
                    nullptr, 0, NI_NUMERICHOST) == 0) {
      text = name;
    }
    close(file);
  }
  freeaddrinfo(found);
  return text;
}

torch::Tensor flat_bytes(const torch::Tensor& tensor) {
  return tensor.view({-1}).view(torch::kByte);
}

}  // namespace

struct RankGroup::Impl {
  RankGroupOptions options;
  std::string backend;
  std::string prefix;
  std::optional<compat::Store> store;
  std::optional<compat::ProcessGroup> control, data;
  std::optional<FailureDetector> watch;
  int comparisons = 0;

  int rank() const { return options.place.rank; }
  int size() const { return options.place.ranks; }

  compat::Store::Options store_options(bool serve) const {
    return {options.place.host, options.place.port, serve,
            in_ms(options.join_timeout_s)};
  }

  /// Waits for a key. Before there is a watch, until the time to arrive is over.
  std::string await(const std::string& key, const std::string& whose) {
    const FailureDetector::Waiting waiting(watch ? &*watch : nullptr);
    const auto until = Clock::now() + in_ms(options.join_timeout_s);
    while (true) {
      if (auto value = store->find(prefix + key)) return *value;
      TORCH_CHECK(watch || Clock::now() < until, "[ranks] ", whose,
                  " has not arrived within ", options.join_timeout_s, " s");
      std::this_thread::sleep_for(milliseconds(2));
    }
  }

  void require_same(const std::map<std::string, std::string>& values) {
    const std::string key = fmt::format("same/{}/", comparisons++);
    const json own = values;
    store->set(fmt::format("{}{}{}", prefix, key, rank()), own.dump());
    std::string verdict;
    if (rank() == 0) {
      try {
        for (int other = 1; other < size() && verdict.empty(); ++other) {
          verdict =
              difference(own,
                         json::parse(await(fmt::format("{}{}", key, other),
                                           fmt::format("rank {}", other))),
                         other);
        }
      } catch (const c10::Error& error) {
        verdict = error.what_without_backtrace();
      }
      store->set(prefix + key + "verdict", verdict);
      // The store ends with this process: not before the others have read it.
      if (!verdict.empty()) {
        const auto until = Clock::now() + std::chrono::seconds(5);
        while (Clock::now() < until &&
               store->add(prefix + key + "read", 0) < size() - 1) {
          std::this_thread::sleep_for(milliseconds(2));
        }
      }
    } else {
      verdict = await(key + "verdict", "rank 0's answer");
      if (!verdict.empty()) store->add(prefix + key + "read", 1);
    }
    TORCH_CHECK(
        verdict.empty(), verdict.starts_with("[") ? "" : "[ranks] ", verdict,
        verdict.starts_with("[") ? ""
                                 : "; all ranks must run the same training");
  }

  void connect() {
    compat::ProcessGroup::Options o;
    o.rank = rank();
    o.size = size();
    o.timeout = kNoLimit;
    o.device = options.device;
    o.address = address_towards(options.place.host, options.place.port);
    o.name = prefix + "control/";
    control.emplace(*store, o);
    o.name = prefix + "data/";
    o.backend = backend;
    data.emplace(*store, o);
  }

  void finish(compat::Work& work) {
    const FailureDetector::Waiting waiting(watch ? &*watch : nullptr);
    guarded([&] { work.wait(); });
  }

  /// Starts a collective through the host and waits for it.
  template <class Start>
  void run(Start&& start) {
    compat::Work work = guarded(start);
    finish(work);
  }

  /// A connection that breaks says little; the watch finds out whose it was.
  template <class Body>
  auto guarded(Body&& body) -> decltype(body()) {
    try {
      return body();
    } catch (const std::exception& error) {
      const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
      if (torch_error != nullptr && is_out_of_memory(*torch_error)) {
        throw;
      }
      const std::string what = error.what();
      if (watch) watch->suspect();
      TORCH_CHECK(false, "[ranks] the connection to another rank broke: ",
                  what.substr(0, what.find('\n')));
    }
  }
};

namespace {

/// Gloo writes to sockets whose other end may be gone. That is an error to it, but the
/// signal's default would end this rank before it can say whose fault it was. Python,
/// where such groups are mostly used, has it ignored from its start.
void ignore_broken_pipes() {
  struct sigaction present = {};
  sigaction(SIGPIPE, nullptr, &present);
  if (present.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

}  // namespace

RankGroup::RankGroup(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
RankGroup::~RankGroup() = default;

std::shared_ptr<RankGroup> RankGroup::join(const RankGroupOptions& options) {
  const RankInfo& place = options.place;
  TORCH_CHECK(place.ranks >= 1 && place.rank >= 0 && place.rank < place.ranks,
              "[ranks] expected a rank below ", place.ranks, ", got ",
              place.rank);
  TORCH_CHECK(options.timeout_s >= 0.5,
              "[--rank-timeout] expected 0.5 seconds or more, got ",
              options.timeout_s);
  ignore_broken_pipes();
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  impl->backend = choose_backend(options);
  impl->prefix = "reprise/" + place.start + "/";
  const bool serves = place.serve && place.rank == 0;
  try {
    impl->store.emplace(impl->store_options(serves));
  } catch (const std::exception& error) {
    const std::string what = error.what();
    TORCH_CHECK(false, "[ranks] rank ", place.rank, " cannot ",
                serves ? "serve" : "reach", " the store at ", place.host, ":",
                place.port, " (MASTER_ADDR, MASTER_PORT): ",
                what.substr(0, what.find('\n')));
  }
  auto same = options.same;
  same["ranks"] = std::to_string(place.ranks);
  same["backend"] = impl->backend;
  impl->require_same(same);
  impl->connect();
  FailureDetector::Options watching;
  watching.store = impl->store_options(false);
  watching.prefix = impl->prefix;
  watching.holder =
      place.serve ? "rank 0"
                  : fmt::format("the store at {}:{}", place.host, place.port);
  watching.holds_store = serves;
  watching.rank = place.rank;
  watching.ranks = place.ranks;
  watching.timeout_s = options.timeout_s;
  watching.on_fault = options.on_fault
                          ? options.on_fault
                          : [rank = place.rank](const std::string& what) {
                              say_and_exit(rank, what);
                            };
  impl->watch.emplace(std::move(watching));
  return std::shared_ptr<RankGroup>(new RankGroup(std::move(impl)));
}

int RankGroup::rank() const {
  return impl_->rank();
}

int RankGroup::size() const {
  return impl_->size();
}

const std::string& RankGroup::backend() const {
  return impl_->backend;
}

void RankGroup::require_same(const std::map<std::string, std::string>& values) {
  impl_->require_same(values);
}

std::vector<int64_t> RankGroup::all_reduce_max(std::vector<int64_t> values) {
  torch::Tensor tensor = torch::from_blob(
      values.data(), {static_cast<int64_t>(values.size())}, torch::kLong);
  impl_->run([&] { return impl_->control->all_reduce_max(tensor); });
  return values;
}

std::vector<double> RankGroup::all_reduce_sum(std::vector<double> values) {
  torch::Tensor tensor = torch::from_blob(
      values.data(), {static_cast<int64_t>(values.size())}, torch::kDouble);
  impl_->run([&] { return impl_->control->all_reduce_sum(tensor); });
  return values;
}

void RankGroup::gather(const torch::Tensor& own, const torch::Tensor& all) {
  TORCH_CHECK(own.scalar_type() == torch::kDouble && own.is_contiguous() &&
                  all.scalar_type() == torch::kDouble && all.is_contiguous() &&
                  all.numel() == size() * own.numel(),
              "[RankGroup::gather] expected contiguous doubles, ", size(),
              " times as many for all");
  // A sum with zeros: Gloo's own gather allocates while it is under way, and where that
  // fails the others would wait for ever.
  auto* to = all.data_ptr<double>();
  std::fill_n(to, all.numel(), 0.0);
  std::copy_n(own.data_ptr<double>(), own.numel(), to + rank() * own.numel());
  torch::Tensor sum = all;
  impl_->run([&] { return impl_->control->all_reduce_sum(sum); });
}

std::string RankGroup::broadcast_text(const std::string& text) {
  const bool first = rank() == 0;
  const int64_t size =
      all_reduce_max({first ? static_cast<int64_t>(text.size()) : 0}).at(0);
  if (size == 0) return "";
  torch::Tensor bytes = torch::empty({size}, torch::kByte);
  if (first) std::memcpy(bytes.data_ptr(), text.data(), text.size());
  broadcast({bytes});
  return {static_cast<const char*>(bytes.data_ptr()),
          static_cast<size_t>(size)};
}

void RankGroup::broadcast(const std::vector<torch::Tensor>& tensors) {
  const torch::NoGradGuard no_grad;
  for (torch::Tensor tensor : tensors) {
    if (tensor.numel() == 0) continue;
    torch::Tensor host = tensor.detach().cpu().contiguous();
    const torch::Tensor bytes = flat_bytes(host);
    for (int64_t at = 0; at < bytes.numel(); at += kChunkBytes) {
      const int64_t end = std::min(bytes.numel(), at + kChunkBytes);
      impl_->run([&] {
        return impl_->control->broadcast(bytes.slice(0, at, end), 0);
      });
    }
    if (rank() != 0 && host.data_ptr() != tensor.data_ptr()) {
      tensor.detach().copy_(host);
    }
  }
}

void RankGroup::broadcast_named(NamedList& tensors) {
  json header = json::array();
  for (const auto& [name, tensor] : tensors) {
    header.push_back(
        {name, static_cast<int>(tensor.scalar_type()), tensor.sizes().vec()});
  }
  header = json::parse(broadcast_text(header.dump()));
  if (rank() != 0) {
    tensors.clear();
    for (const auto& entry : header) {
      tensors.emplace_back(
          entry.at(0).get<std::string>(),
          torch::empty(entry.at(2).get<std::vector<int64_t>>(),
                       static_cast<torch::ScalarType>(entry.at(1).get<int>())));
    }
  }
  std::vector<torch::Tensor> list;
  for (const auto& item : tensors) list.push_back(item.second);
  broadcast(list);
}

compat::Work RankGroup::sum(const torch::Tensor& tensor) {
  return impl_->guarded([&] { return impl_->data->all_reduce_sum(tensor); });
}

compat::Work RankGroup::all_to_all(const torch::Tensor& output,
                                   const torch::Tensor& input) {
  return impl_->guarded([&] { return impl_->data->all_to_all(output, input); });
}

compat::Work RankGroup::all_gather(const torch::Tensor& output,
                                   const torch::Tensor& input) {
  return impl_->guarded([&] { return impl_->data->all_gather(output, input); });
}

void RankGroup::wait(compat::Work& work) {
  impl_->finish(work);
}

void RankGroup::heartbeat() {
  impl_->watch->heartbeat();
}

void RankGroup::pause_watchdog() {
  impl_->watch->pause_watchdog();
}

void RankGroup::fail(const std::string& what) noexcept {
  impl_->watch->fail(what);
}

void RankGroup::leave() {
  impl_->watch->leave();
  if (impl_->data) impl_->data->shut_down();
}

}  // namespace reprise
