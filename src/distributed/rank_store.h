#pragma once

#include "base/socket.h"
#include "compat/key_value_store.h"
#include "distributed/store_server.h"

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace reprise::detail {

/// Where the rendezvous store is.
struct StorePlace {
  std::string host = "127.0.0.1";
  int port = 0;
  /// The server takes the first of `ports` ports, from `port` on, that is free.
  int ports = 1;
  /// All ranks are on this machine: the store is at the loopback address.
  bool one_machine = false;

  std::string text() const;
};

/// Starts the server. On one machine it can be reached from this machine only, otherwise
/// at the address that `host` has, or at all addresses if that is not an address of this
/// machine that others can use. Throws reprise::Error with the address if it is taken.
std::unique_ptr<StoreServer> serve_store(const StorePlace& place,
                                         const StoreServer::Options& options);

/// A connection to the store. Thread-safe: calls are made one after the other. Throws
/// reprise::Error if the store does not reply in time; no call succeeds afterwards.
class RankStore final : public compat::KeyValueStore {
 public:
  struct Options {
    StorePlace place;
    std::string token;
    /// Limit of the constructor, and of each reply in addition to get()'s own.
    std::chrono::milliseconds timeout{300'000};
  };

  /// Tries to reach the store until it answers or the time is over. If another program
  /// answers, or a store with another token, the error says so and names its address.
  explicit RankStore(Options options);

  void set(const std::string& key, const std::string& value) override;
  std::optional<std::string> get(const std::string& key,
                                 std::chrono::milliseconds wait) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool remove(const std::string& key) override;
  int64_t count() override;
  std::shared_ptr<compat::KeyValueStore> clone() override;

 private:
  struct Reply {
    uint8_t status = 0;
    std::string value;
  };
  Reply ask(const std::string& request,
            std::chrono::milliseconds wait = std::chrono::milliseconds(0));
  int64_t ask_number(const std::string& request);

  Options options_;
  std::mutex mutex_;
  Socket socket_;
};

}  // namespace reprise::detail
