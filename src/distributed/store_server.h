#pragma once

#include "base/socket.h"

#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

namespace reprise::detail {

/// Serves the rendezvous store: keys and values of one training, on one thread.
///
/// A connection is a stranger until it has proved that it knows the token
/// (store_protocol.h). Strangers get five seconds, cannot make the server read more than
/// 72 bytes, and never block it: all sockets are non-blocking. If there are too many, the
/// oldest is dropped. A rank whose connection a flood of strangers displaced in this way
/// connects again.
///
/// Tested by tests/distributed/rank_store_test.cpp and strangers_test.py.
class StoreServer {
 public:
  struct Options {
    std::string token;
    size_t most_strangers = 256;
    size_t most_ranks = 1024;  ///< connections that have proved the token
    std::chrono::milliseconds handshake_time{5000};
  };

  /// Serves at a listening socket until the object is destroyed.
  StoreServer(Socket listening, Options options);
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  SocketAddress address() const { return listening_.local(); }

 private:
  using Clock = std::chrono::steady_clock;
  enum class Phase { kHello, kProof, kRank };
  struct Connection {
    Socket socket;
    Phase phase = Phase::kHello;
    Deadline until{};    // of the handshake, or of the wait for a key
    std::string nonces;  // of both sides
    std::string in, out;
    std::optional<std::string> awaited;  // key of a get() without a value yet
  };
  using Connections = std::list<Connection>;

  void run();
  /// How long poll() may sleep, in ms; -1: until an event.
  int time_to_next_deadline() const;
  void accept_all();
  void drop_surplus();
  /// Return false if the connection is to be closed.
  bool receive(Connection& from);
  bool process(Connection& from);
  bool flush(Connection& to);
  bool check_deadline(Connection& of);
  size_t bytes_expected(const Connection& from) const;
  bool answer(Connection& from, std::string_view request);
  void reply(Connection& to, uint8_t status, std::string_view value = "");
  bool store(const std::string& key, std::string value);
  size_t count(bool ranks) const;

  Socket listening_;
  Options options_;
  Socket wake_;
  Connections connections_;  // in the order of their arrival
  std::map<std::string, std::string> values_;
  size_t stored_bytes_ = 0;
  Deadline accept_from_{};  // later than now if descriptors have run out
  std::thread thread_;
};

}  // namespace reprise::detail
