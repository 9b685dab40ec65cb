#include "distributed/store_server.h"

#include "base/throw_error.h"
#include "distributed/store_protocol.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <utility>
#include <vector>

namespace reprise::detail {
namespace {

using std::chrono::milliseconds;

constexpr size_t kLengthBytes = 4;

std::optional<int64_t> number_in(const std::string& text) {
  int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || at != end) return std::nullopt;
  return value;
}

}  // namespace

StoreServer::StoreServer(Socket listening, Options options)
    : listening_(std::move(listening)),
      options_(std::move(options)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_.valid()) throw_error("[ranks] no eventfd: {}", system_reason());
  thread_ = std::thread([this] { run(); });
}

StoreServer::~StoreServer() {
  const uint64_t one = 1;
  while (write(wake_.get(), &one, sizeof one) < 0 && errno == EINTR) {
  }
  thread_.join();
}

void StoreServer::run() {
  std::vector<pollfd> polled;
  while (true) {
    const bool accepting = Clock::now() >= accept_from_;
    polled.assign({{wake_.get(), POLLIN, 0},
                   {accepting ? listening_.get() : -1, POLLIN, 0}});
    for (const Connection& one : connections_) {
      const short events = one.out.empty() ? POLLIN : POLLOUT;
      polled.push_back({one.socket.get(), events, 0});
    }
    if (poll(polled.data(), polled.size(), time_to_next_deadline()) < 0 &&
        errno != EINTR) {
      return;  // out of memory; the ranks see that the store is gone
    }
    if (polled[0].revents != 0) return;
    // Accepted connections are appended: they have no entry in `polled` yet.
    size_t at = 2;
    for (auto one = connections_.begin(); one != connections_.end(); ++at) {
      const short events = at < polled.size() ? polled[at].revents : short{0};
      bool stays = true;
      if ((events & POLLOUT) != 0) stays = flush(*one);
      if (stays && (events & ~POLLOUT) != 0) stays = receive(*one);
      stays = stays && check_deadline(*one);
      one = stays ? std::next(one) : connections_.erase(one);
    }
    if (polled[1].revents != 0) accept_all();
  }
}

int StoreServer::time_to_next_deadline() const {
  Deadline next = Deadline::max();
  if (accept_from_ > Clock::now()) next = accept_from_;
  for (const Connection& one : connections_) {
    if (one.phase != Phase::kRank || one.awaited) {
      next = std::min(next, one.until);
    }
  }
  if (next == Deadline::max()) return -1;
  const auto left = std::chrono::ceil<milliseconds>(next - Clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 60'000));
}

void StoreServer::accept_all() {
  while (true) {
    Socket made(accept4(listening_.get(), nullptr, nullptr,
                        SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!made.valid()) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      // No descriptors are left: those of strangers are free again soon.
      if (errno != EAGAIN) accept_from_ = Clock::now() + milliseconds(100);
      return;
    }
    const int on = 1;
    setsockopt(made.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    Connection& added = connections_.emplace_back();
    added.socket = std::move(made);
    added.until = Clock::now() + options_.handshake_time;
    drop_surplus();
  }
}

size_t StoreServer::count(bool ranks) const {
  return static_cast<size_t>(std::count_if(
      connections_.begin(), connections_.end(), [ranks](const Connection& one) {
        return (one.phase == Phase::kRank) == ranks;
      }));
}

void StoreServer::drop_surplus() {
  if (count(/*ranks=*/false) <= options_.most_strangers) return;
  connections_.erase(std::find_if(
      connections_.begin(), connections_.end(),
      [](const Connection& one) { return one.phase != Phase::kRank; }));
}

size_t StoreServer::bytes_expected(const Connection& from) const {
  if (from.phase == Phase::kHello) return kHelloBytes;
  if (from.phase == Phase::kProof) return kProofBytes;
  if (from.in.size() < kLengthBytes) return kLengthBytes;
  return kLengthBytes + decoded<uint32_t>(from.in.data());
}

bool StoreServer::receive(Connection& from) {
  std::array<char, 1 << 16> part;
  while (true) {
    // The buffer grows with what has arrived, not with what is announced.
    const size_t wanted =
        std::min(bytes_expected(from) - from.in.size(), part.size());
    const ssize_t got = recv(from.socket.get(), part.data(), wanted, 0);
    if (got == 0) return false;
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    if (from.awaited) return false;  // no request before the reply
    from.in.append(part.data(), static_cast<size_t>(got));
    if (from.phase == Phase::kRank && from.in.size() == kLengthBytes &&
        bytes_expected(from) - kLengthBytes > kMostMessageBytes) {
      return false;
    }
    if (from.in.size() < bytes_expected(from)) continue;
    return process(from) && flush(from);
  }
}

bool StoreServer::process(Connection& from) {
  const std::string message = std::exchange(from.in, {});
  if (from.phase == Phase::kRank) {
    return answer(from, std::string_view(message).substr(kLengthBytes));
  }
  if (from.phase == Phase::kHello) {
    if (!message.starts_with(kRankMagic)) return false;
    const std::string own = random_bytes(kNonceBytes);
    from.nonces = message.substr(kRankMagic.size()) + own;
    from.out = std::string(kStoreMagic) + own +
               proof_of_store(options_.token, from.nonces);
    from.phase = Phase::kProof;
    return true;
  }
  if (!equal_in_constant_time(message,
                              proof_of_rank(options_.token, from.nonces)) ||
      count(/*ranks=*/true) >= options_.most_ranks) {
    return false;
  }
  from.phase = Phase::kRank;
  reply(from, static_cast<uint8_t>(StoreReply::kDone));
  return true;
}

bool StoreServer::flush(Connection& to) {
  while (!to.out.empty()) {
    const ssize_t sent =
        send(to.socket.get(), to.out.data(), to.out.size(), MSG_NOSIGNAL);
    if (sent < 0) return errno == EAGAIN || errno == EINTR;
    to.out.erase(0, static_cast<size_t>(sent));
  }
  return true;
}

bool StoreServer::check_deadline(Connection& of) {
  if (of.phase != Phase::kRank) return Clock::now() < of.until;
  if (!of.awaited || Clock::now() < of.until) return true;
  of.awaited.reset();
  reply(of, static_cast<uint8_t>(StoreReply::kMissing));
  return flush(of);
}

void StoreServer::reply(Connection& to, uint8_t status,
                        std::string_view value) {
  to.out += encoded(static_cast<uint32_t>(value.size() + 1));
  to.out += static_cast<char>(status);
  to.out += value;
}

bool StoreServer::store(const std::string& key, std::string value) {
  const auto found = values_.find(key);
  const size_t before =
      found == values_.end() ? 0 : key.size() + found->second.size();
  const size_t after = stored_bytes_ - before + key.size() + value.size();
  if (after > kMostStoredBytes) return false;
  stored_bytes_ = after;
  const std::string& stored = values_[key] = std::move(value);
  for (Connection& one : connections_) {
    if (one.awaited != key) continue;
    one.awaited.reset();
    reply(one, static_cast<uint8_t>(StoreReply::kDone), stored);
    flush(one);  // poll() reports a broken connection
  }
  return true;
}

bool StoreServer::answer(Connection& from, std::string_view request) {
  constexpr size_t kHeader = 3;
  if (request.size() < kHeader) return false;
  const auto op = static_cast<StoreOp>(request[0]);
  const size_t key_bytes = decoded<uint16_t>(request.data() + 1);
  if (key_bytes > kMostKeyBytes || request.size() < kHeader + key_bytes) {
    return false;
  }
  const std::string key(request.substr(kHeader, key_bytes));
  const std::string_view rest = request.substr(kHeader + key_bytes);
  const auto done = [&](std::string_view value = "") {
    reply(from, static_cast<uint8_t>(StoreReply::kDone), value);
    return true;
  };
  const auto refuse = [&](std::string_view why) {
    reply(from, static_cast<uint8_t>(StoreReply::kRefused), why);
    return true;
  };
  const auto found = values_.find(key);
  switch (op) {
    case StoreOp::kSet:
      return store(key, std::string(rest)) ? done()
                                           : refuse("the store is full");
    case StoreOp::kGet: {
      if (rest.size() != 8) return false;
      if (found != values_.end()) return done(found->second);
      const auto wait_ms = decoded<int64_t>(rest.data());
      if (wait_ms <= 0) {
        reply(from, static_cast<uint8_t>(StoreReply::kMissing));
        return true;
      }
      constexpr int64_t kMonth = int64_t{30} * 24 * 3600 * 1000;
      from.awaited = key;
      from.until = Clock::now() + milliseconds(std::min(wait_ms, kMonth));
      return true;
    }
    case StoreOp::kAdd: {
      if (rest.size() != 8) return false;
      const auto before =
          found == values_.end() ? int64_t{0} : number_in(found->second);
      int64_t after = 0;
      if (!before || __builtin_add_overflow(
                         *before, decoded<int64_t>(rest.data()), &after)) {
        return refuse("the value of " + key + " is no number to add to");
      }
      if (!store(key, std::to_string(after))) {
        return refuse("the store is full");
      }
      return done(encoded(after));
    }
    case StoreOp::kRemove:
      if (found != values_.end()) {
        stored_bytes_ -= key.size() + found->second.size();
        values_.erase(found);
        return done("1");
      }
      return done("0");
    case StoreOp::kCount:
      return done(encoded(static_cast<int64_t>(values_.size())));
  }
  return false;
}

}  // namespace reprise::detail
