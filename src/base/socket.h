#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <string_view>
#include <sys/socket.h>
#include <vector>

/// TCP connections whose every wait has a deadline.
namespace reprise {

using Deadline = std::chrono::steady_clock::time_point;

/// An address of IPv4 or IPv6 with a port.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;

  const sockaddr* get() const {
    return reinterpret_cast<const sockaddr*>(&storage);
  }
  int port() const;
  SocketAddress with_port(int port) const;
  /// Whether it is of 127.0.0.0/8 or ::1, which other machines cannot reach.
  bool is_loopback() const;
  /// "10.0.0.1" or "::1"; empty if the address is.
  std::string host() const;
  /// "10.0.0.1:29500" or "[::1]:29500"; "the other end" if it is empty.
  std::string text() const;
  /// The bytes that identify it in a sockaddr_in or sockaddr_in6.
  std::string_view bytes() const;
};

/// The addresses of a host name or a literal address. Throws reprise::Error if there
/// are none.
std::vector<SocketAddress> resolve(const std::string& host, int port);

/// The address of this machine on the route to `host`, at which other machines can reach
/// it. Empty if there is none. Throws reprise::Error if `host` has no address.
std::string own_address_towards(const std::string& host, int port);

/// Whether `host` is "localhost" or a literal loopback address.
bool is_loopback_host(const std::string& host);

/// A descriptor of a socket, which is closed with the object. Not thread-safe.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  ~Socket();
  Socket(Socket&& other) noexcept;
  Socket& operator=(Socket&& other) noexcept;

  int get() const { return descriptor_; }
  bool valid() const { return descriptor_ >= 0; }
  void close();

  /// The address of this end, and of the other end.
  SocketAddress local() const;
  SocketAddress remote() const;

  /// Sends or receives exactly `count` bytes. Throw reprise::Error with the address of
  /// the other end if it closes the connection or does not answer before the deadline.
  void write(const void* bytes, size_t count, Deadline deadline) const;
  void read(void* bytes, size_t count, Deadline deadline) const;

 private:
  int descriptor_ = -1;
};

/// A non-blocking socket that listens at `address`; port 0 takes a free one. Throws
/// reprise::Error with the address and the system's reason.
Socket listen_at(const SocketAddress& address);

/// A non-blocking connection. Throws reprise::Error if it is refused or not accepted
/// before the deadline.
Socket connect_to(const SocketAddress& address, Deadline deadline);

}  // namespace reprise
