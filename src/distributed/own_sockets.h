#pragma once

#include "base/socket.h"

#include <string>
#include <vector>

/// The TCP sockets of this process, with which it finds those that Gloo has opened and
/// does not show.
namespace reprise::detail {

struct OwnSocket {
  int descriptor = -1;
  bool listening = false;
  SocketAddress local, remote;  ///< `remote` is empty if it is listening
};

/// All TCP sockets of this process that listen or are connected.
std::vector<OwnSocket> own_sockets();

/// Makes the kernel discard what arrives at a listening socket, for as long as it exists.
/// Its owner notices nothing, and connections that were accepted before are not affected.
/// Returns false if the kernel refuses.
bool discard_arrivals(const OwnSocket& listening);

}  // namespace reprise::detail
