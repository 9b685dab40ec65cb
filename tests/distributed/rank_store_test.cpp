#include "distributed/rank_store.h"

#include "distributed/store_protocol.h"
#include "support.h"

#include <reprise/base/error.h>
#include <reprise/distributed/launch.h>

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <sys/socket.h>
#include <thread>
#include <vector>

namespace reprise::testing {
namespace {

using detail::RankStore;
using detail::StorePlace;
using detail::StoreServer;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr const char* kToken = "a token of this test";

Deadline soon() {
  return Clock::now() + milliseconds(3000);
}

/// A server at a free port of this machine, and what a rank needs to reach it.
struct Served {
  explicit Served(StoreServer::Options options = {.token = kToken})
      : server(listen_at(resolve("127.0.0.1", 0).at(0)), std::move(options)),
        place{"127.0.0.1", server.address().port(), 1, true} {}

  RankStore::Options reach(const std::string& token = kToken) const {
    return {place, token, milliseconds(3000)};
  }
  /// A connection without a handshake.
  Socket stranger(const std::string& bytes = "") const {
    Socket made = connect_to(server.address(), soon());
    made.write(bytes.data(), bytes.size(), soon());
    return made;
  }

  StoreServer server;
  StorePlace place;
};

/// Whether the other end closes the connection before the deadline, whatever it sends.
bool is_closed(const Socket& socket, Deadline until = soon()) {
  try {
    char byte = 0;
    while (true) socket.read(&byte, 1, until);
  } catch (const Error& error) {
    const std::string what = error.what();
    return what.find("does not answer") == std::string::npos;
  }
}

std::string hello() {
  return std::string(detail::kRankMagic) + random_bytes(detail::kNonceBytes);
}

/// A connection that has proved the token and sends `request` as it is.
Socket member(const Served& served, const std::string& request) {
  const std::string greeting = hello();
  Socket made = served.stranger(greeting);
  std::string challenge(detail::kChallengeBytes, '\0');
  made.read(challenge.data(), challenge.size(), soon());
  const std::string proof = detail::proof_of_rank(
      kToken, greeting.substr(8) + challenge.substr(8, detail::kNonceBytes));
  made.write(proof.data(), proof.size(), soon());
  std::string accepted(5, '\0');
  made.read(accepted.data(), accepted.size(), soon());
  made.write(request.data(), request.size(), soon());
  return made;
}

void expect_works(const Served& served) {
  RankStore store(served.reach());
  store.set("key", "value");
  EXPECT_EQ(store.get("key", milliseconds(0)), "value");
}

TEST(RankStore, KeepsValuesAndCounters) {
  const Served served;
  RankStore store(served.reach());
  EXPECT_FALSE(store.get("a", milliseconds(0)));
  store.set("a", std::string("x\0y", 3));
  EXPECT_EQ(store.get("a", milliseconds(0)), std::string("x\0y", 3));
  store.set("a", "");
  EXPECT_EQ(store.get("a", milliseconds(0)), "");
  EXPECT_EQ(store.add("n", 2), 2);
  EXPECT_EQ(store.clone()->add("n", -5), -3);
  EXPECT_EQ(store.get("n", milliseconds(0)), "-3");
  EXPECT_NE(error_of([&] { store.add("a", 1); }).find("no number"),
            std::string::npos);
  EXPECT_EQ(store.count(), 2);
  EXPECT_TRUE(store.remove("a"));
  EXPECT_FALSE(store.remove("a"));
  EXPECT_EQ(store.count(), 1);
  const std::string large(3 << 20, 'v');
  store.set("large", large);
  EXPECT_EQ(store.get("large", milliseconds(0)), large);
}

TEST(RankStore, GetWaitsForTheValueOrTheTime) {
  const Served served;
  RankStore store(served.reach());
  std::thread later([&] {
    std::this_thread::sleep_for(milliseconds(50));
    store.clone()->set("late", "here");
  });
  EXPECT_EQ(store.get("late", milliseconds(3000)), "here");
  later.join();
  const auto start = Clock::now();
  EXPECT_FALSE(store.get("never", milliseconds(60)));
  EXPECT_GE(Clock::now() - start, milliseconds(60));
  EXPECT_LT(Clock::now() - start, milliseconds(1500));
}

TEST(RankStore, StrangersAreDroppedInTime) {
  const Served served({.token = kToken, .handshake_time = milliseconds(200)});
  const auto start = Clock::now();
  std::vector<Socket> held;
  held.push_back(served.stranger());
  held.push_back(served.stranger("\2"));
  held.push_back(served.stranger(hello()));
  held.push_back(served.stranger(hello().substr(0, 39)));
  expect_works(served);
  for (const Socket& one : held) EXPECT_TRUE(is_closed(one));
  EXPECT_LT(Clock::now() - start, milliseconds(2000));
}

TEST(RankStore, StrangersAreNotBelieved) {
  const Served served;
  RankStore store(served.reach());
  const std::string set = detail::store_request(detail::StoreOp::kSet, "fault",
                                                "a stranger's text");
  const std::string frame =
      detail::encoded(static_cast<uint32_t>(set.size())) + set;
  EXPECT_TRUE(is_closed(served.stranger(frame + std::string(64, 'x'))));
  EXPECT_TRUE(is_closed(served.stranger(
      hello() + std::string(detail::kProofBytes, 'x') + frame)));
  EXPECT_TRUE(is_closed(served.stranger(random_bytes(4096))));
  EXPECT_TRUE(
      is_closed(served.stranger("GET / HTTP/1.1\r\nHost: store\r\n"
                                "Accept: everything\r\n\r\n")));
  EXPECT_FALSE(store.get("fault", milliseconds(0)));
  EXPECT_EQ(store.count(), 0);
}

/// What the server says to one stranger, another cannot use.
TEST(RankStore, ProofsCannotBeReflected) {
  const Served served;
  const Socket first = served.stranger(hello());
  std::string challenge(detail::kChallengeBytes, '\0');
  first.read(challenge.data(), challenge.size(), soon());
  const Socket second =
      served.stranger(std::string(detail::kRankMagic) +
                      challenge.substr(8, detail::kNonceBytes));
  std::string answer(detail::kChallengeBytes, '\0');
  second.read(answer.data(), answer.size(), soon());
  const std::string proof = answer.substr(8 + detail::kNonceBytes);
  first.write(proof.data(), proof.size(), soon());
  EXPECT_TRUE(is_closed(first));
}

TEST(RankStore, ManyStrangersDoNotExcludeRanks) {
  const Served served({.token = kToken, .most_strangers = 8});
  std::vector<Socket> held;
  for (int i = 0; i < 100; ++i) held.push_back(served.stranger("\1"));
  EXPECT_TRUE(is_closed(held.front()));
  EXPECT_FALSE(is_closed(held.back(), Clock::now() + milliseconds(50)));
  expect_works(served);
}

TEST(RankStore, LimitsWhatRanksSend) {
  const Served served;
  EXPECT_TRUE(
      is_closed(member(served, detail::encoded(uint32_t{1} << 30) + "x")));
  EXPECT_TRUE(is_closed(member(served, detail::encoded(uint32_t{1}) + "x")));
  RankStore store(served.reach());
  EXPECT_NE(error_of([&] {
              store.set("key", std::string(detail::kMostMessageBytes, 'x'));
            }).find("the store takes"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              store.set(std::string(2000, 'k'), "");
            }).find("the store takes"),
            std::string::npos);
  expect_works(served);
}

/// Another program that listens: sends a text on each connection and then nothing, or
/// closes it.
class ForeignServer {
 public:
  ForeignServer(std::string says, bool closes)
      : thread_([this, says = std::move(says), closes] {
          std::vector<Socket> held;
          while (!ended_) {
            std::this_thread::sleep_for(milliseconds(1));
            Socket one(accept(listening_.get(), nullptr, nullptr));
            if (!one.valid()) continue;
            one.write(says.data(), says.size(), soon());
            if (!closes) held.push_back(std::move(one));
          }
        }) {}
  ~ForeignServer() {
    ended_ = true;
    thread_.join();
  }

  SocketAddress address() const { return listening_.local(); }
  /// What a rank says that takes it for the store.
  std::string error(milliseconds timeout) const {
    const StorePlace place{"localhost", address().port(), 1, true};
    const auto start = Clock::now();
    std::string text = error_of([&] { RankStore({place, kToken, timeout}); });
    EXPECT_LT(Clock::now() - start, timeout + milliseconds(1500));
    return text;
  }

 private:
  Socket listening_ = listen_at(resolve("127.0.0.1", 0).at(0));
  std::atomic<bool> ended_ = false;
  std::thread thread_;
};

TEST(RankStore, NamesAForeignServer) {
  for (const char* text : {"", "x"}) {
    const ForeignServer silent(text, false);
    EXPECT_EQ(silent.error(milliseconds(200)),
              silent.address().text() +
                  " is no rendezvous store of ranks: [socket] " +
                  silent.address().text() + " does not answer");
  }
  const ForeignServer closing("", true);
  EXPECT_NE(closing.error(milliseconds(200))
                .find(closing.address().text() + " is no rendezvous store"),
            std::string::npos);
  const ForeignServer web("HTTP/1.1 400 Bad Request\r\n\r\n", false);
  EXPECT_EQ(web.error(milliseconds(200)),
            web.address().text() +
                " is another program's: it is no rendezvous store of ranks");
}

TEST(RankStore, NamesAStoreWithAnotherToken) {
  const Served served;
  auto options = served.reach("another token");
  options.timeout = milliseconds(300);
  const std::string text = error_of([&] { RankStore{options}; });
  EXPECT_NE(text.find(served.server.address().text() +
                      " is the store of another training, or has another "
                      "token than this rank (REPRISE_RANK_TOKEN)"),
            std::string::npos)
      << text;
}

TEST(RankStore, TakesTheNextPortIfOneIsTaken) {
  const Socket foreign = listen_at(resolve("127.0.0.1", 0).at(0));
  StorePlace place{"127.0.0.1", foreign.local().port(), 1, true};
  EXPECT_NE(error_of([&] {
              serve_store(place, {.token = kToken});
            }).find(foreign.local().text() + ": Address already in use"),
            std::string::npos);
  place.ports = 8;
  const auto server = serve_store(place, {.token = kToken});
  EXPECT_GT(server->address().port(), place.port);
  EXPECT_TRUE(server->address().is_loopback());
  // The rank finds another program at the first port, which says nothing.
  std::thread closing([&] {
    Socket one;
    while (!one.valid()) one = Socket(accept(foreign.get(), nullptr, nullptr));
  });
  RankStore store({place, kToken, milliseconds(8000)});
  store.set("key", "value");
  closing.join();
}

TEST(RankStore, ServesOtherMachinesOnlyIfThereAreAny) {
  StorePlace place{"localhost", free_port(), 1, true};
  EXPECT_EQ(serve_store(place, {.token = kToken})->address().text(),
            "127.0.0.1:" + std::to_string(place.port));
  // The address of no machine here, such as that of a router.
  place = {"203.0.113.1", free_port(), 1, false};
  EXPECT_EQ(serve_store(place, {.token = kToken})->address().text(),
            "0.0.0.0:" + std::to_string(place.port));
}

TEST(RankStore, AServerThatEndsIsAnError) {
  auto served = std::make_unique<Served>();
  RankStore store(served->reach());
  served.reset();
  EXPECT_NE(error_of([&] { store.get("key", milliseconds(0)); }), "");
  EXPECT_NE(error_of([&] {
              store.set("key", "value");
            }).find("the connection to the store has ended"),
            std::string::npos);
}

}  // namespace
}  // namespace reprise::testing
