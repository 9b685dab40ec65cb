#include "base/sha256.h"
#include "base/socket.h"
#include "compat/cuda.h"
#include "distributed/connect_group.h"
#include "distributed/failure_detector.h"
#include "distributed/rank_store.h"
#include "distributed/rank_token.h"

#include <reprise/base/error.h>
#include <reprise/distributed/group.h>
#include <reprise/memory/meter.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <optional>
#include <thread>

namespace reprise {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;
using std::chrono::milliseconds;

/// Collectives have no time-out of their own; the failure detector ends them.
constexpr milliseconds kNoLimit = std::chrono::hours(24 * 30);
/// Maximum size of a CPU message.
constexpr int64_t kChunkBytes = int64_t{64} << 20;

milliseconds in_ms(double seconds) {
  return milliseconds(static_cast<int64_t>(1000 * seconds));
}

std::string choose_backend(const RankGroupOptions& options) {
  const int devices = compat::cuda_device_count();
  if (options.backend.empty()) {
    return options.device.is_cuda() &&
                   compat::ProcessGroup::available("nccl") &&
                   options.rank_info.local_world_size <= devices
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

void report_and_exit(int rank, const std::string& what) {
  const std::string line =
      fmt::format("reprise: rank {} ends: {}\n", rank, what);
  std::fputs(line.c_str(), stderr);
  std::fflush(stderr);
  std::_Exit(1);
}

/// "rank 2 has model gpt2, rank 0 has bert-base". Empty if they are equal.
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

torch::Tensor flat_bytes(const torch::Tensor& tensor) {
  return tensor.view({-1}).view(torch::kByte);
}

}  // namespace

struct RankGroup::Impl {
  RankGroupOptions options;
  std::string backend;
  std::string prefix;
  std::unique_ptr<detail::StoreServer> server;  // on rank 0; destroyed last
  std::shared_ptr<compat::KeyValueStore> store;
  std::unique_ptr<compat::ProcessGroup> control, data, parameters;
  std::shared_ptr<detail::FailureDetector> detector;
  int comparisons = 0;
  int splits = 0;
  bool is_part = false;  // made by split()

  int rank() const { return options.rank_info.rank; }
  int size() const { return options.rank_info.world_size; }

  detail::StorePlace store_place() const {
    const RankInfo& info = options.rank_info;
    return {info.store_host, info.store_port, info.store_ports,
            info.one_machine || is_loopback_host(info.store_host)};
  }

  /// Starts the store on rank 0, and connects to it.
  void open_store() {
    const RankInfo& info = options.rank_info;
    const detail::StorePlace place = store_place();
    const bool serves = info.rank == 0;
    try {
      // Ranks of other trainings of the same user are strangers as well.
      const std::string token(bytes_of(hmac_sha256(
          detail::rank_token(),
          fmt::format("{} ranks of {}", info.world_size, info.run_id))));
      if (serves) {
        server = detail::serve_store(
            place,
            {.token = token,
             .most_ranks = 64 + 16 * static_cast<size_t>(info.world_size)});
      }
      store = std::make_shared<detail::RankStore>(
          detail::RankStore::Options{.place = place,
                                     .token = token,
                                     .timeout = in_ms(options.join_timeout_s)});
    } catch (const Error& error) {
      const std::string what = error.what();
      TORCH_CHECK(false, "[ranks] rank ", info.rank, " cannot ",
                  serves ? "serve" : "reach", " the store at ", place.text(),
                  " (MASTER_ADDR, MASTER_PORT): ",
                  what.substr(what.starts_with("[") ? what.find("] ") + 2 : 0));
    }
  }

  /// Waits for a key in the store. Throws after join_timeout_s while there is no
  /// failure detector yet.
  std::string await(const std::string& key, const std::string& whose) {
    const detail::FailureDetector::Waiting waiting(detector.get());
    const auto until = Clock::now() + in_ms(options.join_timeout_s);
    while (true) {
      if (auto value = store->get(prefix + key, milliseconds(100))) {
        return *value;
      }
      TORCH_CHECK(detector || Clock::now() < until, "[ranks] ", whose,
                  " has not arrived within ", options.join_timeout_s, " s");
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
      // This process may serve the store: keep it until the others have read it.
      if (!verdict.empty()) {
        const auto until = Clock::now() + std::chrono::seconds(5);
        while (Clock::now() < until &&
               store->add(prefix + key + "read", 0) < size() - 1) {
          std::this_thread::sleep_for(milliseconds(2));
        }
      }
    } else {
      verdict = await(key + "verdict", "the reply of rank 0");
      if (!verdict.empty()) store->add(prefix + key + "read", 1);
    }
    TORCH_CHECK(
        verdict.empty(), verdict.starts_with("[") ? "" : "[ranks] ", verdict,
        verdict.starts_with("[") ? ""
                                 : "; all ranks must run the same training");
  }

  compat::ProcessGroup::Options connection(const std::string& name,
                                           const std::string& kind) const {
    compat::ProcessGroup::Options o;
    o.rank = rank();
    o.size = size();
    o.timeout = kNoLimit;
    o.device = options.device;
    o.address = store_place().one_machine
                    ? "127.0.0.1"
                    : own_address_towards(options.rank_info.store_host,
                                          options.rank_info.store_port);
    o.name = prefix + name + "/";
    o.backend = kind;
    return o;
  }

  std::unique_ptr<compat::ProcessGroup> connected(const std::string& name,
                                                  const std::string& kind) {
    try {
      return detail::connect_group(
          store, connection(name, kind),
          Clock::now() + in_ms(options.join_timeout_s));
    } catch (const Error& error) {
      TORCH_CHECK(false, error.what());
    }
  }

  void connect() {
    control = connected("control", "gloo");
    data = connected("data", backend);
  }

  compat::ProcessGroup& lane(Lane which) {
    if (which == Lane::kGradients) return *data;
    if (!parameters) {
      const detail::FailureDetector::Waiting waiting(detector.get());
      parameters = connected("parameters", backend);
    }
    return *parameters;
  }

  void finish(compat::Work& work) {
    const detail::FailureDetector::Waiting waiting(detector.get());
    guarded([&] { work.wait(); });
  }

  /// Runs a collective on the CPU connection and waits for it.
  template <class Start>
  void run(Start&& start) {
    compat::Work work = guarded(start);
    finish(work);
  }

  /// Lets the failure detector find out which rank broke the connection.
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
      if (detector) detector->suspect();
      TORCH_CHECK(false, "[ranks] the connection to another rank broke: ",
                  what.substr(0, what.find('\n')));
    }
  }
};

namespace {

/// Gloo may write to a socket whose peer is dead. It handles the error, but the default
/// action of SIGPIPE would end this process before it reports which rank failed. Python
/// ignores SIGPIPE as well.
void ignore_broken_pipes() {
  struct sigaction present = {};
  sigaction(SIGPIPE, nullptr, &present);
  if (present.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

}  // namespace

RankGroup::RankGroup(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
RankGroup::~RankGroup() {
  if (impl_->is_part && std::uncaught_exceptions() == 0) leave();
}

std::shared_ptr<RankGroup> RankGroup::join(const RankGroupOptions& options) {
  const RankInfo& info = options.rank_info;
  TORCH_CHECK(
      info.world_size >= 1 && info.rank >= 0 && info.rank < info.world_size,
      "[ranks] expected a rank below ", info.world_size, ", got ", info.rank);
  TORCH_CHECK(options.timeout_s >= 0.5,
              "[--rank-timeout] expected 0.5 seconds or more, got ",
              options.timeout_s);
  ignore_broken_pipes();
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  impl->backend = choose_backend(options);
  impl->prefix = "reprise/" + info.run_id + "/";
  impl->open_store();
  auto same = options.must_match;
  same["ranks"] = std::to_string(info.world_size);
  same["backend"] = impl->backend;
  impl->require_same(same);
  impl->connect();
  detail::FailureDetector::Options detection;
  detection.store = impl->store->clone();
  detection.prefix = impl->prefix;
  detection.holder = "rank 0";
  detection.holds_store = info.rank == 0;
  detection.rank = info.rank;
  detection.world_size = info.world_size;
  detection.timeout_s = options.timeout_s;
  detection.on_fault = options.on_fault
                           ? options.on_fault
                           : [rank = info.rank](const std::string& what) {
                               report_and_exit(rank, what);
                             };
  impl->detector =
      std::make_shared<detail::FailureDetector>(std::move(detection));
  return std::shared_ptr<RankGroup>(new RankGroup(std::move(impl)));
}

std::shared_ptr<RankGroup> RankGroup::split(int part) {
  std::vector<int64_t> parts(static_cast<size_t>(size()), -1);
  parts[static_cast<size_t>(rank())] = part;
  parts = all_reduce_max(std::move(parts));
  auto impl = std::make_unique<Impl>();
  impl->options = impl_->options;
  impl->backend = impl_->backend;
  impl->prefix =
      fmt::format("{}split/{}/{}/", impl_->prefix, impl_->splits++, part);
  impl->store = impl_->store;
  impl->detector = impl_->detector;
  impl->is_part = true;
  RankInfo& info = impl->options.rank_info;
  info.world_size =
      static_cast<int>(std::count(parts.begin(), parts.end(), part));
  info.rank =
      static_cast<int>(std::count(parts.begin(), parts.begin() + rank(), part));
  const detail::FailureDetector::Waiting waiting(impl->detector.get());
  impl_->guarded([&] { impl->connect(); });
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
  // Sums with zeros instead of Gloo's gather, which allocates while it runs: if an
  // allocation fails on one rank, the others wait forever.
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

compat::Work RankGroup::all_reduce(const torch::Tensor& tensor) {
  return impl_->guarded([&] { return impl_->data->all_reduce_sum(tensor); });
}

compat::Work RankGroup::all_to_all(const torch::Tensor& output,
                                   const torch::Tensor& input) {
  return impl_->guarded([&] { return impl_->data->all_to_all(output, input); });
}

compat::Work RankGroup::all_gather(const torch::Tensor& output,
                                   const torch::Tensor& input, Lane lane) {
  return impl_->guarded(
      [&] { return impl_->lane(lane).all_gather(output, input); });
}

void RankGroup::wait(compat::Work& work) {
  impl_->finish(work);
}

void RankGroup::heartbeat() {
  impl_->detector->heartbeat();
}

void RankGroup::pause_watchdog() {
  impl_->detector->pause_watchdog();
}

void RankGroup::fail(const std::string& what) noexcept {
  impl_->detector->fail(what);
}

void RankGroup::leave() {
  if (!impl_->is_part) impl_->detector->leave();
  if (impl_->data) impl_->data->shut_down();
  if (impl_->parameters) impl_->parameters->shut_down();
  impl_->data.reset();
  impl_->parameters.reset();
}

}  // namespace reprise
