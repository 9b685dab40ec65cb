#pragma once

#include "base/socket.h"
#include "compat/process_group.h"

#include <memory>
#include <string>
#include <vector>

/// Process groups whose connections are known to be those of the ranks.
///
/// While Gloo connects, each rank listens for the others at ports that the kernel chose,
/// and takes whoever comes first for a rank. A stranger who finds such a port in time
/// takes the place of a rank; the rank is refused, and the others wait for ever.
/// Therefore, when a rank has connected, it tells the others through the store what its
/// connections are. Each has two ends: those that are not an end of two ranks are a
/// stranger's. A message from each rank to each other then shows that no stranger's bytes
/// are in the way. If anything is wrong, all ranks close their connections and try again,
/// at other ports. In the end, listening sockets that remain are made deaf.
///
/// Tested by tests/distributed/connect_group_test.cpp.
namespace reprise::detail {

/// What a rank has connected.
struct RankConnections {
  std::string
      error;  ///< why the rank has failed to connect; empty if it has not
  /// The addresses of both ends of each connection, as text: own, other.
  std::vector<std::pair<std::string, std::string>> ends;
};

/// Returns what is wrong with the connections of all ranks; empty if each rank has
/// exactly one connection to every other and no more.
std::string find_stranger(const std::vector<RankConnections>& ranks);

/// Connects a group by collective calls on all of its ranks. Throws reprise::Error if it
/// is not done before the deadline, with what was wrong last. Groups of NCCL, which
/// recognizes its connections itself, are made without a check.
std::unique_ptr<compat::ProcessGroup> connect_group(
    const std::shared_ptr<compat::KeyValueStore>& store,
    const compat::ProcessGroup::Options& options, Deadline until);

}  // namespace reprise::detail
