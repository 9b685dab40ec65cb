#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace reprise::compat {

/// A store of keys and values that all ranks share. Process groups use it to exchange
/// the addresses of their connections. Calls are thread-safe; a call that fails throws.
/// Tested by tests/distributed/rank_store_test.cpp.
class KeyValueStore {
 public:
  KeyValueStore() = default;
  virtual ~KeyValueStore() = default;
  KeyValueStore(const KeyValueStore&) = delete;
  KeyValueStore& operator=(const KeyValueStore&) = delete;

  /// Sets the value of `key`.
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// Returns the value of `key`, for which it waits up to `wait`; nothing if it is not
  /// set by then.
  virtual std::optional<std::string> get(
      const std::string& key,
      std::chrono::milliseconds wait = std::chrono::milliseconds(0)) = 0;
  /// Adds `value` to a counter that starts at 0, and returns the new value. get()
  /// returns it as decimal digits.
  virtual int64_t add(const std::string& key, int64_t value) = 0;
  /// Removes a key. Returns whether it was set.
  virtual bool remove(const std::string& key) = 0;
  /// The number of keys.
  virtual int64_t count() = 0;
  /// The same store by a connection of its own, so that waits of one do not delay the
  /// other.
  virtual std::shared_ptr<KeyValueStore> clone() = 0;
};

}  // namespace reprise::compat
