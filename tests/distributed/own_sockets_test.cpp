#include "distributed/own_sockets.h"

#include "support.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <sys/socket.h>

namespace reprise::testing {
namespace {

using detail::OwnSocket;
using std::chrono::milliseconds;

Deadline in(milliseconds time) {
  return std::chrono::steady_clock::now() + time;
}

const OwnSocket* find_own(const std::vector<OwnSocket>& all, int descriptor) {
  for (const OwnSocket& one : all) {
    if (one.descriptor == descriptor) return &one;
  }
  return nullptr;
}

TEST(OwnSockets, FindsWhatListensAndWhatIsConnected) {
  const Socket server = listen_at(resolve("127.0.0.1", 0).at(0));
  const Socket client = connect_to(server.local(), in(milliseconds(1000)));
  const auto all = detail::own_sockets();
  const OwnSocket* listening = find_own(all, server.get());
  ASSERT_NE(listening, nullptr);
  EXPECT_TRUE(listening->listening);
  EXPECT_EQ(listening->local.text(), server.local().text());
  const OwnSocket* connected = find_own(all, client.get());
  ASSERT_NE(connected, nullptr);
  EXPECT_FALSE(connected->listening);
  EXPECT_EQ(connected->local.text(), client.local().text());
  EXPECT_EQ(connected->remote.text(), server.local().text());
  EXPECT_EQ(find_own(all, 0), nullptr);
}

TEST(OwnSockets, ADeafSocketKeepsItsConnections) {
  const Socket server = listen_at(resolve("127.0.0.1", 0).at(0));
  const Socket before = connect_to(server.local(), in(milliseconds(1000)));
  const Socket accepted(accept(server.get(), nullptr, nullptr));
  ASSERT_TRUE(accepted.valid());
  const auto all = detail::own_sockets();
  ASSERT_TRUE(detail::discard_arrivals(*find_own(all, server.get())));
  EXPECT_NE(error_of([&] {
              connect_to(server.local(), in(milliseconds(100)));
            }).find("does not accept a connection"),
            std::string::npos);
  before.write("x", 1, in(milliseconds(1000)));
  char byte = 0;
  accepted.read(&byte, 1, in(milliseconds(1000)));
  EXPECT_EQ(byte, 'x');
}

}  // namespace
}  // namespace reprise::testing
