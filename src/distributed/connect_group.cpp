#include "distributed/connect_group.h"

#include "base/throw_error.h"
#include "distributed/own_sockets.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <torch/types.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <sys/socket.h>
#include <thread>
#include <utility>

namespace reprise::detail {
namespace {

using Clock = std::chrono::steady_clock;
using compat::KeyValueStore;
using compat::ProcessGroup;
using nlohmann::json;
using std::chrono::milliseconds;

/// Slices of waits, between which a wait can be given up.
constexpr milliseconds kSlice{50};
/// Time for the messages that test the connections.
constexpr milliseconds kTestTime{10'000};

/// The addresses that Gloo published and those that it read.
struct Addresses {
  std::mutex mutex;
  std::string own, others;
  std::atomic<bool> given_up = false;
};

/// Notes the addresses that a group exchanges, and ends its waits if it is given up.
class ObservedStore final : public KeyValueStore {
 public:
  ObservedStore(std::shared_ptr<KeyValueStore> store,
                std::shared_ptr<Addresses> seen)
      : store_(std::move(store)), seen_(std::move(seen)) {}

  void set(const std::string& key, const std::string& value) override {
    {
      const std::lock_guard lock(seen_->mutex);
      seen_->own += value;
    }
    store_->set(key, value);
  }
  std::optional<std::string> get(const std::string& key,
                                 milliseconds wait) override {
    const auto until = Clock::now() + wait;
    while (true) {
      const auto left = std::chrono::ceil<milliseconds>(until - Clock::now());
      auto value = store_->get(key, std::clamp(left, milliseconds(0), kSlice));
      if (value) {
        const std::lock_guard lock(seen_->mutex);
        seen_->others += *value;
        return value;
      }
      if (seen_->given_up) throw Error("[ranks] another rank has failed");
      if (left <= kSlice) return std::nullopt;
    }
  }
  int64_t add(const std::string& key, int64_t value) override {
    return store_->add(key, value);
  }
  bool remove(const std::string& key) override { return store_->remove(key); }
  int64_t count() override { return store_->count(); }
  std::shared_ptr<KeyValueStore> clone() override {
    return std::make_shared<ObservedStore>(store_->clone(), seen_);
  }

 private:
  std::shared_ptr<KeyValueStore> store_;
  std::shared_ptr<Addresses> seen_;
};

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

/// One attempt to connect all ranks.
class Attempt {
 public:
  Attempt(std::shared_ptr<KeyValueStore> store, ProcessGroup::Options options,
          int number, Deadline until)
      : store_(std::move(store)), options_(std::move(options)), until_(until) {
    options_.name = fmt::format("{}{}/", options_.name, number);
  }

  /// Returns the group if all ranks have connected; otherwise null, and wrong() says why.
  std::unique_ptr<ProcessGroup> run() {
    RankConnections own;
    std::unique_ptr<ProcessGroup> group = connect(own.error);
    if (group) {
      for (const OwnSocket& one : sockets(/*listening=*/false)) {
        own.ends.emplace_back(one.local.text(), one.remote.text());
      }
    }
    wrong_ = find_stranger(exchange("ends", own));
    if (wrong_.empty()) {
      RankConnections tested;
      tested.error = test(*group);
      for (const RankConnections& rank : exchange("tested", tested)) {
        if (wrong_.empty()) wrong_ = rank.error;
      }
    }
    if (!wrong_.empty()) {
      // Ends what still waits for a stranger.
      for (const OwnSocket& one : sockets(/*listening=*/false)) {
        shutdown(one.descriptor, SHUT_RDWR);
      }
      return nullptr;
    }
    for (const OwnSocket& one : sockets(/*listening=*/true)) {
      discard_arrivals(one);
    }
    return group;
  }

  const std::string& wrong() const { return wrong_; }
  /// Whether the time of any rank is over. All ranks have the same answer.
  bool is_last() const { return is_last_; }

  /// Waits until all ranks know that they have failed: one of them serves the store.
  void leave() const {
    const std::string key = options_.name + "left";
    const auto end = Clock::now() + milliseconds(2000);
    try {
      store_->add(key, 1);
      while (store_->add(key, 0) < options_.size && Clock::now() < end) {
        std::this_thread::sleep_for(milliseconds(2));
      }
    } catch (const Error&) {
      // The rank that serves it knows, and has left.
    }
  }

 private:
  std::unique_ptr<ProcessGroup> connect(std::string& error) {
    std::atomic<bool> done = false;
    std::thread watch([this, &done] { release_if_hopeless(done); });
    std::unique_ptr<ProcessGroup> group;
    try {
      group = std::make_unique<ProcessGroup>(
          std::make_shared<ObservedStore>(store_, seen_), options_);
    } catch (const std::exception& failure) {
      error = fmt::format("rank {} cannot connect: {}", options_.rank,
                          first_line(failure.what()));
    }
    done = true;
    watch.join();
    if (!group) store_->set(options_.name + "failed", error);
    return group;
  }

  /// If another rank has failed, or the time is over, connects to the ports at which this
  /// rank still waits for ranks that will not come.
  void release_if_hopeless(const std::atomic<bool>& done) {
    try {
      auto look = Clock::now() + milliseconds(200);
      while (!done) {
        std::this_thread::sleep_for(milliseconds(1));
        if (Clock::now() < look) continue;
        look = Clock::now() + kSlice;
        if (!store_->get(options_.name + "failed", milliseconds(0)) &&
            Clock::now() < until_) {
          continue;
        }
        seen_->given_up = true;
        for (const OwnSocket& one : sockets(/*listening=*/true)) {
          knock(one.local);
        }
      }
    } catch (const std::exception&) {
      // The store is gone: the rank's own calls report it.
      seen_->given_up = true;
    }
  }

  /// Gloo since LibTorch 2 expects a number, which tells it who connects.
  void knock(const SocketAddress& address) const {
    for (int64_t number = 0; number < options_.size; ++number) {
      try {
        const auto until = Clock::now() + milliseconds(200);
        connect_to(address, until).write(&number, sizeof number, until);
      } catch (const Error&) {
        return;
      }
    }
  }

  /// The sockets of this group: those at an address that Gloo published on this rank, and
  /// those connected to one that another rank published.
  std::vector<OwnSocket> sockets(bool listening) const {
    const std::lock_guard lock(seen_->mutex);
    std::vector<OwnSocket> list;
    for (const OwnSocket& one : own_sockets()) {
      if (one.listening != listening) continue;
      const bool awaited = has(seen_->own, one.local);
      if (awaited || (!listening && has(seen_->others, one.remote))) {
        list.push_back(one);
      }
    }
    return list;
  }

  static bool has(const std::string& addresses, const SocketAddress& one) {
    return addresses.find(one.bytes()) != std::string::npos;
  }

  /// Gives `own` to all ranks and returns those of all.
  std::vector<RankConnections> exchange(const std::string& what,
                                        const RankConnections& own) {
    const auto key = [&](int rank) {
      return fmt::format("{}{}/{}", options_.name, what, rank);
    };
    const bool late = Clock::now() >= until_;
    store_->set(key(options_.rank), json{own.error, own.ends, late}.dump());
    std::vector<RankConnections> all;
    for (int rank = 0; rank < options_.size; ++rank) {
      std::optional<std::string> text;
      do {
        text = store_->get(key(rank), kSlice);
      } while (!text && Clock::now() < until_ + kTestTime);
      if (!text) {
        throw_error("[ranks] rank {} has not connected in time", rank);
      }
      const json list = json::parse(*text);
      RankConnections& read = all.emplace_back();
      read.error = list.at(0).get<std::string>();
      list.at(1).get_to(read.ends);
      is_last_ = is_last_ || list.at(2).get<bool>();
    }
    return all;
  }

  /// Sends a number from each rank to each. Returns what went wrong.
  std::string test(ProcessGroup& group) {
    const auto number = [](int from, int to) { return from * 1'000'003L + to; };
    torch::Tensor sent = torch::empty({options_.size}, torch::kLong);
    torch::Tensor got = torch::zeros({options_.size}, torch::kLong);
    for (int other = 0; other < options_.size; ++other) {
      sent.data_ptr<int64_t>()[other] = number(options_.rank, other);
    }
    try {
      const auto left = std::chrono::ceil<milliseconds>(until_ - Clock::now());
      group.exchange_numbers(got, sent,
                             std::clamp(left, milliseconds(0), kTestTime));
    } catch (const std::exception& failure) {
      return fmt::format("rank {} receives no messages: {}", options_.rank,
                         first_line(failure.what()));
    }
    for (int other = 0; other < options_.size; ++other) {
      if (got.data_ptr<int64_t>()[other] != number(other, options_.rank)) {
        return fmt::format("rank {} receives messages that no rank has sent",
                           options_.rank);
      }
    }
    return "";
  }

  std::shared_ptr<KeyValueStore> store_;
  ProcessGroup::Options options_;
  Deadline until_;
  std::shared_ptr<Addresses> seen_ = std::make_shared<Addresses>();
  std::string wrong_;
  bool is_last_ = false;
};

}  // namespace

std::string find_stranger(const std::vector<RankConnections>& ranks) {
  for (const RankConnections& rank : ranks) {
    if (!rank.error.empty()) return rank.error;
  }
  std::map<std::pair<std::string, std::string>, size_t> owners;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const auto& ends : ranks[rank].ends) owners[ends] = rank;
  }
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    std::set<size_t> reached;
    for (const auto& [own, other] : ranks[rank].ends) {
      const auto owner = owners.find({other, own});
      if (owner == owners.end() || owner->second == rank) {
        return fmt::format(
            "{}, which is no rank, is connected to {}, where rank {} waits for "
            "another rank",
            other, own, rank);
      }
      reached.insert(owner->second);
    }
    if (reached.size() + 1 != ranks.size() ||
        ranks[rank].ends.size() != reached.size()) {
      return fmt::format("rank {} has {} connections to {} of {} other ranks",
                         rank, ranks[rank].ends.size(), reached.size(),
                         ranks.size() - 1);
    }
  }
  return "";
}

std::unique_ptr<ProcessGroup> connect_group(
    const std::shared_ptr<KeyValueStore>& store,
    const ProcessGroup::Options& options, Deadline until) {
  if (options.backend != "gloo" || options.size == 1) {
    return std::make_unique<ProcessGroup>(store, options);
  }
  for (int number = 0;; ++number) {
    Attempt attempt(store, options, number, until);
    if (auto group = attempt.run()) return group;
    if (attempt.is_last()) {
      attempt.leave();
      throw_error("[ranks] the ranks cannot connect: {}", attempt.wrong());
    }
  }
}

}  // namespace reprise::detail
