#include "distributed/rank_store.h"

#include "base/throw_error.h"
#include "distributed/store_protocol.h"

#include <algorithm>
#include <cstring>
#include <netinet/in.h>
#include <thread>
#include <utility>
#include <vector>

namespace reprise::detail {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// Another program may hold the port for a moment, such as a training that ends.
constexpr milliseconds kPatience{10'000};

constexpr const char* kLoopback = "127.0.0.1";

bool is_of_this_machine(const SocketAddress& address) {
  const Socket probe(
      socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  return probe.valid() && bind(probe.get(), address.get(), address.size) == 0;
}

/// The address to listen at.
SocketAddress own_address(const StorePlace& place, int port) {
  if (place.one_machine) return resolve(kLoopback, port).at(0);
  bool v4 = false;
  for (const SocketAddress& address : resolve(place.host, 0)) {
    v4 = v4 || address.storage.ss_family == AF_INET;
    // Distributions map the name of a machine to 127.0.1.1 on itself.
    if (address.is_loopback() || !is_of_this_machine(address)) continue;
    return address.with_port(port);
  }
  // The name may be of a router or of a virtual address.
  return resolve(v4 ? "0.0.0.0" : "::", port).at(0);
}

/// Thrown if something answers that is not the store.
class NotTheStore : public Error {
 public:
  using Error::Error;
};

Socket authenticated(const SocketAddress& address, const std::string& token,
                     Deadline limit) {
  const Deadline until = std::min(limit, Clock::now() + kHandshakeTime);
  Socket made = connect_to(address, until);
  const auto not_the_store = [&](const std::string& why) {
    return NotTheStore(fmt::format("{} {}", address.text(), why));
  };
  const std::string nonce = random_bytes(kNonceBytes);
  std::string challenge(kChallengeBytes, '\0');
  try {
    const std::string hello = std::string(kRankMagic) + nonce;
    made.write(hello.data(), hello.size(), until);
    made.read(challenge.data(), kStoreMagic.size(), until);
    if (challenge.starts_with(kStoreMagic)) {
      made.read(challenge.data() + kStoreMagic.size(),
                kChallengeBytes - kStoreMagic.size(), until);
    }
  } catch (const Error& error) {
    throw not_the_store("is no rendezvous store of ranks: " +
                        std::string(error.what()));
  }
  if (!challenge.starts_with(kStoreMagic)) {
    throw not_the_store(
        "is another program's: it is no rendezvous store of ranks");
  }
  const std::string nonces =
      nonce + challenge.substr(kStoreMagic.size(), kNonceBytes);
  if (!equal_in_constant_time(
          std::string_view(challenge).substr(kStoreMagic.size() + kNonceBytes),
          proof_of_store(token, nonces))) {
    throw not_the_store(
        "is the store of another training, or has another token than this "
        "rank (REPRISE_RANK_TOKEN)");
  }
  const std::string proof = proof_of_rank(token, nonces);
  made.write(proof.data(), proof.size(), until);
  std::string accepted(5, '\0');
  made.read(accepted.data(), accepted.size(), until);
  return made;
}

}  // namespace

std::string StorePlace::text() const {
  const std::string name = one_machine ? kLoopback : host;
  return ports == 1
             ? fmt::format("{}:{}", name, port)
             : fmt::format("{}, ports {} to {}", name, port, port + ports - 1);
}

std::unique_ptr<StoreServer> serve_store(const StorePlace& place,
                                         const StoreServer::Options& options) {
  std::string why;
  for (int port = place.port; port < place.port + place.ports; ++port) {
    try {
      return std::make_unique<StoreServer>(listen_at(own_address(place, port)),
                                           options);
    } catch (const Error& error) {
      why = error.what();
    }
  }
  throw Error(why);
}

RankStore::RankStore(Options options) : options_(std::move(options)) {
  const StorePlace& place = options_.place;
  const Deadline limit = Clock::now() + options_.timeout;
  Deadline foreign_since{};
  std::string why, foreign;
  while (true) {
    for (int port = place.port; port < place.port + place.ports; ++port) {
      try {
        for (const SocketAddress& address :
             resolve(place.one_machine ? kLoopback : place.host, port)) {
          try {
            socket_ = authenticated(address, options_.token, limit);
            return;
          } catch (const NotTheStore& error) {
            if (foreign.empty()) foreign_since = Clock::now();
            // The last attempt may have had no time for an answer.
            if (foreign.empty() || Clock::now() < limit) foreign = error.what();
          } catch (const Error& error) {
            why = error.what();  // not there yet
            if (place.ports == 1) foreign.clear();
          }
        }
      } catch (const Error& error) {
        why = error.what();
      }
    }
    const bool patient = foreign.empty() || place.ports > 1 ||
                         Clock::now() - foreign_since < kPatience;
    if (!patient || Clock::now() >= limit) break;
    std::this_thread::sleep_for(milliseconds(5));
  }
  throw Error(foreign.empty() ? why : foreign);
}

RankStore::Reply RankStore::ask(const std::string& request, milliseconds wait) {
  const std::lock_guard lock(mutex_);
  if (!socket_.valid()) {
    throw_error("[ranks] the connection to the store has ended");
  }
  try {
    const Deadline until = Clock::now() + options_.timeout + wait;
    const std::string message =
        encoded(static_cast<uint32_t>(request.size())) + request;
    socket_.write(message.data(), message.size(), until);
    std::string length(4, '\0');
    socket_.read(length.data(), length.size(), until);
    const auto size = decoded<uint32_t>(length.data());
    if (size == 0 || size > kMostMessageBytes) {
      throw_error("[ranks] the store sends {} bytes", size);
    }
    std::string reply(size, '\0');
    socket_.read(reply.data(), reply.size(), until);
    return {static_cast<uint8_t>(reply[0]), reply.substr(1)};
  } catch (const Error&) {
    socket_
        .close();  // a late reply must not be taken for that of another request
    throw;
  }
}

void RankStore::set(const std::string& key, const std::string& value) {
  const std::string request = store_request(StoreOp::kSet, key, value);
  if (key.size() > kMostKeyBytes || request.size() > kMostMessageBytes) {
    throw_error(
        "[ranks] the store takes keys of {} bytes and messages of {}, got "
        "{} and {}",
        kMostKeyBytes, kMostMessageBytes, key.size(), request.size());
  }
  const Reply reply = ask(request);
  if (reply.status != static_cast<uint8_t>(StoreReply::kDone)) {
    throw_error("[ranks] {}", reply.value);
  }
}

std::optional<std::string> RankStore::get(const std::string& key,
                                          milliseconds wait) {
  Reply reply = ask(store_request(StoreOp::kGet, key,
                                  encoded(static_cast<int64_t>(wait.count()))),
                    wait);
  if (reply.status != static_cast<uint8_t>(StoreReply::kDone)) {
    return std::nullopt;
  }
  return std::move(reply.value);
}

int64_t RankStore::ask_number(const std::string& request) {
  const Reply reply = ask(request);
  if (reply.status != static_cast<uint8_t>(StoreReply::kDone) ||
      reply.value.size() != 8) {
    throw_error("[ranks] {}", reply.value);
  }
  return decoded<int64_t>(reply.value.data());
}

int64_t RankStore::add(const std::string& key, int64_t value) {
  return ask_number(store_request(StoreOp::kAdd, key, encoded(value)));
}

bool RankStore::remove(const std::string& key) {
  return ask(store_request(StoreOp::kRemove, key)).value == "1";
}

int64_t RankStore::count() {
  return ask_number(store_request(StoreOp::kCount, ""));
}

std::shared_ptr<compat::KeyValueStore> RankStore::clone() {
  return std::make_shared<RankStore>(options_);
}

}  // namespace reprise::detail
