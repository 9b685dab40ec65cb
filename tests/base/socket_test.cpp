#include "base/socket.h"

#include "support.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <sys/socket.h>

namespace reprise::testing {
namespace {

using std::chrono::milliseconds;

Deadline after(milliseconds time) {
  return std::chrono::steady_clock::now() + time;
}

TEST(Socket, ConnectsAndCarriesBytes) {
  const Socket server = listen_at(resolve("127.0.0.1", 0).at(0));
  const SocketAddress address = server.local();
  EXPECT_GT(address.port(), 0);
  EXPECT_TRUE(address.is_loopback());
  const Socket client = connect_to(address, after(milliseconds(1000)));
  const Socket accepted(accept(server.get(), nullptr, nullptr));
  ASSERT_TRUE(accepted.valid());
  EXPECT_EQ(client.remote().text(), address.text());
  EXPECT_EQ(client.local().bytes(), accepted.remote().bytes());
  const std::string sent(100'000, 'x');
  client.write(sent.data(), sent.size(), after(milliseconds(1000)));
  std::string got(sent.size(), '\0');
  accepted.read(got.data(), got.size(), after(milliseconds(1000)));
  EXPECT_EQ(got, sent);
}

TEST(Socket, KeepsItsDeadlines) {
  const Socket server = listen_at(resolve("127.0.0.1", 0).at(0));
  const Socket client = connect_to(server.local(), after(milliseconds(1000)));
  const auto start = std::chrono::steady_clock::now();
  char byte = 0;
  EXPECT_EQ(error_of([&] { client.read(&byte, 1, after(milliseconds(50))); }),
            "[socket] " + server.local().text() + " does not answer");
  // The other end reads nothing, so that its buffers fill.
  const std::string much(size_t{64} << 20, 'x');
  EXPECT_EQ(error_of([&] {
              client.write(much.data(), much.size(), after(milliseconds(50)));
            }),
            "[socket] " + server.local().text() + " reads nothing");
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(2000));
}

TEST(Socket, NamesTheAddressInErrors) {
  Socket server = listen_at(resolve("127.0.0.1", 0).at(0));
  const SocketAddress address = server.local();
  EXPECT_EQ(error_of([&] { listen_at(address); }),
            "[socket] cannot listen at " + address.text() +
                ": Address already in use");
  const Socket client = connect_to(address, after(milliseconds(1000)));
  { const Socket accepted(accept(server.get(), nullptr, nullptr)); }
  char byte = 0;
  EXPECT_EQ(error_of([&] { client.read(&byte, 1, after(milliseconds(1000))); }),
            "[socket] " + address.text() + " has closed the connection");
  server.close();
  EXPECT_EQ(
      error_of([&] { connect_to(address, after(milliseconds(1000))); }),
      "[socket] cannot connect to " + address.text() + ": Connection refused");
  EXPECT_NE(error_of([] {
              resolve("no-such-host.invalid", 1);
            }).find("cannot resolve no-such-host.invalid"),
            std::string::npos);
}

TEST(Socket, FindsTheAddressOfARoute) {
  EXPECT_EQ(own_address_towards("127.0.0.1", 1), "127.0.0.1");
  EXPECT_EQ(own_address_towards("localhost", 1).substr(0, 3) == "127",
            resolve("localhost", 1).at(0).storage.ss_family == AF_INET);
}

TEST(Socket, KnowsLoopbackAddresses) {
  EXPECT_TRUE(resolve("127.0.1.1", 1).at(0).is_loopback());
  EXPECT_TRUE(resolve("::1", 1).at(0).is_loopback());
  EXPECT_FALSE(resolve("10.0.0.1", 1).at(0).is_loopback());
  EXPECT_TRUE(is_loopback_host("localhost"));
  EXPECT_TRUE(is_loopback_host("127.0.0.1"));
  EXPECT_FALSE(is_loopback_host("node1"));
  EXPECT_EQ(resolve("::1", 80).at(0).text(), "[::1]:80");
  EXPECT_EQ(resolve("10.0.0.1", 80).at(0).text(), "10.0.0.1:80");
  EXPECT_EQ(resolve("10.0.0.1", 80).at(0).with_port(81).text(), "10.0.0.1:81");
  EXPECT_EQ(resolve("::1", 80).at(0).with_port(81).text(), "[::1]:81");
}

}  // namespace
}  // namespace reprise::testing
