#include "base/socket.h"

#include "base/throw_error.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>
#include <utility>

namespace reprise {
namespace {

using detail::system_reason;
using detail::throw_error;

/// Waits for an event. Returns false if the deadline comes first.
bool wait_for(int file, short events, Deadline deadline) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    pollfd one{file, events, 0};
    const int ready = poll(
        &one, 1, static_cast<int>(std::clamp<int64_t>(left.count(), 0, 60000)));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) {
      throw_error("[socket] cannot wait: {}", system_reason());
    }
    if (std::chrono::steady_clock::now() >= deadline) return false;
  }
}

Socket new_socket(int family) {
  Socket made(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!made.valid()) throw_error("[socket] no socket: {}", system_reason());
  return made;
}

const sockaddr_in& as_v4(const SocketAddress& address) {
  return reinterpret_cast<const sockaddr_in&>(address.storage);
}

const sockaddr_in6& as_v6(const SocketAddress& address) {
  return reinterpret_cast<const sockaddr_in6&>(address.storage);
}

}  // namespace

int SocketAddress::port() const {
  return ntohs(storage.ss_family == AF_INET6 ? as_v6(*this).sin6_port
                                             : as_v4(*this).sin_port);
}

SocketAddress SocketAddress::with_port(int port) const {
  SocketAddress other = *this;
  // The port has the same place in both kinds of addresses.
  reinterpret_cast<sockaddr_in&>(other.storage).sin_port =
      htons(static_cast<uint16_t>(port));
  return other;
}

bool SocketAddress::is_loopback() const {
  if (storage.ss_family == AF_INET) {
    return ntohl(as_v4(*this).sin_addr.s_addr) >> 24 == 127;
  }
  return storage.ss_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&as_v6(*this).sin6_addr);
}

std::string SocketAddress::host() const {
  char name[NI_MAXHOST];
  if (size == 0 || getnameinfo(get(), size, name, sizeof name, nullptr, 0,
                               NI_NUMERICHOST) != 0) {
    return "";
  }
  return name;
}

std::string SocketAddress::text() const {
  const std::string name = host();
  if (name.empty()) return "the other end";
  return storage.ss_family == AF_INET6 ? fmt::format("[{}]:{}", name, port())
                                       : fmt::format("{}:{}", name, port());
}

std::string_view SocketAddress::bytes() const {
  // Family, port and address; IPv6 has a flow label before the address.
  const size_t count = storage.ss_family == AF_INET6 ? 24 : 8;
  return {reinterpret_cast<const char*>(&storage), count};
}

std::vector<SocketAddress> resolve(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error =
      getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) {
    throw_error("[socket] cannot resolve {}: {}", host, gai_strerror(error));
  }
  std::vector<SocketAddress> list;
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
    SocketAddress address;
    if (at->ai_addrlen > sizeof address.storage) continue;
    std::memcpy(&address.storage, at->ai_addr, at->ai_addrlen);
    address.size = at->ai_addrlen;
    list.push_back(address);
  }
  freeaddrinfo(found);
  return list;
}

std::string own_address_towards(const std::string& host, int port) {
  for (const SocketAddress& to : resolve(host, port)) {
    // No packet is sent.
    const Socket probe(
        socket(to.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (probe.valid() && connect(probe.get(), to.get(), to.size) == 0) {
      return probe.local().host();
    }
  }
  return "";
}

bool is_loopback_host(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

Socket::~Socket() {
  close();
}

Socket::Socket(Socket&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)) {}

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    descriptor_ = std::exchange(other.descriptor_, -1);
  }
  return *this;
}

void Socket::close() {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

SocketAddress Socket::local() const {
  SocketAddress address;
  address.size = sizeof address.storage;
  if (getsockname(descriptor_, reinterpret_cast<sockaddr*>(&address.storage),
                  &address.size) != 0) {
    address.size = 0;
  }
  return address;
}

SocketAddress Socket::remote() const {
  SocketAddress address;
  address.size = sizeof address.storage;
  if (getpeername(descriptor_, reinterpret_cast<sockaddr*>(&address.storage),
                  &address.size) != 0) {
    address.size = 0;
  }
  return address;
}

void Socket::write(const void* bytes, size_t count, Deadline deadline) const {
  const char* at = static_cast<const char*>(bytes);
  while (count > 0) {
    const ssize_t sent = send(descriptor_, at, count, MSG_NOSIGNAL);
    if (sent > 0) {
      at += sent;
      count -= static_cast<size_t>(sent);
    } else if (errno == EAGAIN) {
      if (!wait_for(descriptor_, POLLOUT, deadline)) {
        throw_error("[socket] {} reads nothing", remote().text());
      }
    } else if (errno != EINTR) {
      throw_error("[socket] the connection to {} broke: {}", remote().text(),
                  system_reason());
    }
  }
}

void Socket::read(void* bytes, size_t count, Deadline deadline) const {
  char* at = static_cast<char*>(bytes);
  while (count > 0) {
    const ssize_t got = recv(descriptor_, at, count, 0);
    if (got > 0) {
      at += got;
      count -= static_cast<size_t>(got);
    } else if (got == 0) {
      throw_error("[socket] {} has closed the connection", remote().text());
    } else if (errno == EAGAIN) {
      if (!wait_for(descriptor_, POLLIN, deadline)) {
        throw_error("[socket] {} does not answer", remote().text());
      }
    } else if (errno != EINTR) {
      throw_error("[socket] the connection to {} broke: {}", remote().text(),
                  system_reason());
    }
  }
}

Socket listen_at(const SocketAddress& address) {
  Socket made = new_socket(address.storage.ss_family);
  const int on = 1;
  setsockopt(made.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(made.get(), address.get(), address.size) != 0 ||
      listen(made.get(), SOMAXCONN) != 0) {
    const int reason = errno;
    throw_error("[socket] cannot listen at {}: {}", address.text(),
                system_reason(reason));
  }
  return made;
}

Socket connect_to(const SocketAddress& address, Deadline deadline) {
  Socket made = new_socket(address.storage.ss_family);
  const int on = 1;
  setsockopt(made.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  int error = 0;
  if (connect(made.get(), address.get(), address.size) != 0) error = errno;
  if (error == EINPROGRESS || error == EINTR) {
    if (!wait_for(made.get(), POLLOUT, deadline)) {
      throw_error("[socket] {} does not accept a connection", address.text());
    }
    socklen_t size = sizeof error;
    getsockopt(made.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  }
  if (error != 0) {
    throw_error("[socket] cannot connect to {}: {}", address.text(),
                system_reason(error));
  }
  return made;
}

}  // namespace reprise
