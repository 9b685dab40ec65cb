#include "distributed/own_sockets.h"

#include <cstdlib>
#include <dirent.h>
#include <linux/filter.h>
#include <memory>
#include <netinet/in.h>
#include <sys/socket.h>

namespace reprise::detail {
namespace {

int option_of(int descriptor, int name) {
  int value = -1;
  socklen_t size = sizeof value;
  if (getsockopt(descriptor, SOL_SOCKET, name, &value, &size) != 0) return -1;
  return value;
}

SocketAddress address_by(int (*query)(int, sockaddr*, socklen_t*),
                         int descriptor) {
  SocketAddress address;
  address.size = sizeof address.storage;
  if (query(descriptor, reinterpret_cast<sockaddr*>(&address.storage),
            &address.size) != 0) {
    address = {};
  }
  return address;
}

}  // namespace

std::vector<OwnSocket> own_sockets() {
  std::vector<OwnSocket> list;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir("/proc/self/fd"),
                                                   closedir);
  if (!folder) return list;
  while (const dirent* entry = readdir(folder.get())) {
    char* end = nullptr;
    const int file = static_cast<int>(std::strtol(entry->d_name, &end, 10));
    if (*end != '\0' || option_of(file, SO_TYPE) != SOCK_STREAM) continue;
    const int domain = option_of(file, SO_DOMAIN);
    if (domain != AF_INET && domain != AF_INET6) continue;
    OwnSocket found{file, option_of(file, SO_ACCEPTCONN) == 1,
                    address_by(getsockname, file),
                    address_by(getpeername, file)};
    if (found.listening || found.remote.size > 0) list.push_back(found);
  }
  return list;
}

bool discard_arrivals(const OwnSocket& listening) {
  sock_filter keep_nothing = BPF_STMT(BPF_RET | BPF_K, 0);
  const sock_fprog program{1, &keep_nothing};
  return setsockopt(listening.descriptor, SOL_SOCKET, SO_ATTACH_FILTER,
                    &program, sizeof program) == 0;
}

}  // namespace reprise::detail
