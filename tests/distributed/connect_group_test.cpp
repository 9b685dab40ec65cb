#include "distributed/connect_group.h"

#include "base/sha256.h"
#include "distributed/own_sockets.h"
#include "distributed/rank_store.h"
#include "ranks.h"

#include <reprise/base/error.h>

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace reprise::testing {
namespace {

using detail::connect_group;
using detail::find_stranger;
using detail::RankConnections;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

TEST(ConnectGroup, FindsWhoIsNoRank) {
  const RankConnections zero{"", {{"a:1", "b:9"}, {"a:2", "c:8"}}};
  const RankConnections one{"", {{"b:9", "a:1"}, {"b:3", "c:4"}}};
  RankConnections two{"", {{"c:8", "a:2"}, {"c:4", "b:3"}}};
  EXPECT_EQ(find_stranger({zero, one, two}), "");
  two.ends[1] = {"c:4", "x:66"};
  const std::string stranger =
      "x:66, which is no rank, is connected to c:4, where rank 2 waits for "
      "another rank";
  const std::string refused =
      "c:4, which is no rank, is connected to b:3, where rank 1 waits for "
      "another rank";
  const std::string found = find_stranger({zero, one, two});
  EXPECT_TRUE(found == stranger || found == refused) << found;
  two.ends[1] = {"c:8", "a:2"};
  EXPECT_NE(find_stranger({zero, one, two}), "");
  two.ends = {{"c:8", "a:2"}};
  EXPECT_NE(find_stranger({zero, {"", {{"b:9", "a:1"}}}, two})
                .find("rank 1 has 1 connections to 1 of 2 other ranks"),
            std::string::npos);
  EXPECT_EQ(find_stranger({zero, {"rank 1 cannot connect: why", {}}, two}),
            "rank 1 cannot connect: why");
  EXPECT_NE(find_stranger({{"", {{"a:1", "a:2"}, {"a:2", "a:1"}}}, {}}), "");
}

/// A store that shows what a group publishes.
class ShownStore final : public compat::KeyValueStore {
 public:
  using Show = std::function<void(const std::string&)>;
  ShownStore(std::shared_ptr<compat::KeyValueStore> store, Show show)
      : store_(std::move(store)), show_(std::move(show)) {}
  void set(const std::string& key, const std::string& value) override {
    show_(value);
    store_->set(key, value);
  }
  std::optional<std::string> get(const std::string& key,
                                 milliseconds wait) override {
    return store_->get(key, wait);
  }
  int64_t add(const std::string& key, int64_t value) override {
    return store_->add(key, value);
  }
  bool remove(const std::string& key) override { return store_->remove(key); }
  int64_t count() override { return store_->count(); }
  std::shared_ptr<compat::KeyValueStore> clone() override {
    return std::make_shared<ShownStore>(store_->clone(), show_);
  }

 private:
  std::shared_ptr<compat::KeyValueStore> store_;
  Show show_;
};

/// Connects to whatever this process listens at and an address is published of.
class Stranger {
 public:
  Stranger(std::string says, int attacks)
      : says_(std::move(says)), left_(attacks) {}

  void operator()(const std::string& published) {
    if (left_ <= 0) return;
    const std::lock_guard lock(mutex_);
    for (const detail::OwnSocket& one : detail::own_sockets()) {
      if (!one.listening ||
          published.find(one.local.bytes()) == std::string::npos) {
        continue;
      }
      try {
        const auto soon = Clock::now() + milliseconds(500);
        Socket made = connect_to(one.local, soon);
        made.write(says_.data(), says_.size(), soon);
        held_.push_back(std::move(made));
        --left_;
      } catch (const Error&) {
      }
    }
  }
  size_t connections() const { return held_.size(); }

 private:
  std::mutex mutex_;
  std::string says_;
  std::atomic<int> left_;
  std::vector<Socket> held_;
};

/// Connects this process, which is one of several ranks, to the others. `show` is called
/// with what it publishes before the others can read it.
std::unique_ptr<compat::ProcessGroup> connect_rank(
    const std::string& name, milliseconds time, const ShownStore::Show& show) {
  static const RankInfo info = *rank_info_from_environment();
  static const detail::StorePlace place{"127.0.0.1", info.store_port, 1, true};
  static const auto server =
      info.rank == 0 ? detail::serve_store(place, {.token = "token"}) : nullptr;
  static const auto store =
      std::make_shared<detail::RankStore>(detail::RankStore::Options{
          .place = place, .token = "token", .timeout = milliseconds(20000)});
  compat::ProcessGroup::Options options;
  options.name = name;
  options.rank = info.rank;
  options.size = info.world_size;
  options.address = "127.0.0.1";
  options.timeout = std::chrono::hours(1);
  auto group = connect_group(std::make_shared<ShownStore>(store, show), options,
                             Clock::now() + time);
  // Rank 0 serves the store and must not end before the others have connected.
  torch::Tensor sum = torch::ones({3});
  group->all_reduce_sum(sum).wait();
  EXPECT_EQ(sum[0].item<float>(), float(info.world_size));
  return group;
}

TEST(ConnectGroup, ConnectsRanks) {
  expect_all_well(in_ranks({.ranks = 4}, [] {
    const auto start = Clock::now();
    connect_rank("a/", milliseconds(20000), [](const auto&) {});
    connect_rank("b/", milliseconds(20000), [](const auto&) {});
    EXPECT_LT(Clock::now() - start, milliseconds(15000));
  }));
}

TEST(ConnectGroup, TriesAgainIfAStrangerTookThePlaceOfARank) {
  expect_all_well(in_ranks({.ranks = 3}, [] {
    const auto start = Clock::now();
    for (const std::string& says : {std::string(), std::string("\2"),
                                    random_bytes(5), random_bytes(4096)}) {
      // One rank, or each, is attacked.
      for (const int attacked : {1, -1}) {
        const bool here = attacked < 0 || attacked == child_rank();
        Stranger stranger(says, here ? 2 : 0);
        connect_rank("group/" + std::to_string(attacked) + "/" +
                         std::to_string(says.size()) + "/",
                     milliseconds(30000), [&](const std::string& published) {
                       stranger(published);
                     });
        EXPECT_EQ(stranger.connections() > 0, here);
      }
    }
    EXPECT_LT(Clock::now() - start, milliseconds(30000));
  }));
}

TEST(ConnectGroup, KeepsItsTimeIfStrangersNeverStop) {
  const auto ends = in_ranks({.ranks = 2}, [] {
    Stranger stranger("", 1'000'000);
    const auto start = Clock::now();
    const std::string error = error_of([&] {
      connect_rank("group/", milliseconds(1000),
                   [&](const std::string& published) { stranger(published); });
    });
    EXPECT_LT(Clock::now() - start, milliseconds(6000));
    std::fprintf(stderr, "%s\n", error.c_str());
  });
  expect_all_well(ends);
  for (const RankEnd& end : ends) {
    if (child_rank() >= 0) break;
    EXPECT_NE(end.error.find("[ranks] the ranks cannot connect: "),
              std::string::npos)
        << end.error;
  }
}

}  // namespace
}  // namespace reprise::testing
