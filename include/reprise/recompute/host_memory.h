#pragma once

#include <reprise/memory/host_store.h>
#include <reprise/recompute/chain.h>

#include <cstdint>
#include <memory>
#include <vector>

/// Kept activations in the host's memory: a variant that every stage can have.
///
/// The stage runs as it is, but the tensors that autograd saves move to the host
/// while it runs, and come back for its backward. The device then holds of it only
/// what others hold anyway (its inputs and outputs, parameters, buffers) and what is
/// small. Values come back as they went, so results are the same in every bit.
///
///     auto store = make_host_store(0, 8LL << 30);
///     chain = with_host_variants(chain, store);
///
/// Copies run beside the stage: each begins where its tensor is saved, and by the
/// stage's end the device's stream has been told to wait for the last, so that a
/// stage leaves no more on the device than its figures say. In the backward the first
/// tensor that is asked for brings all of the run's back, the last saved first; an
/// operation OpKind::kFetch of a schedule begins that earlier.
namespace reprise {

struct HostOptions {
  /// Storages below this stay: a copy of its own would cost more than it brings.
  int64_t smallest_bytes = int64_t{1} << 20;
  /// Copies under way within a stage; for one more, the device's stream waits for
  /// the oldest.
  int most_in_flight = 4;
};

/// What that variant is called.
inline constexpr const char* kOnHost = "on the host";

/// A copy of `stage` with a variant more, kOnHost, the last one. What there is no room
/// for in `store` stays on the device. Throws c10::Error where `store` is null.
Stage with_host_variant(const Stage& stage, std::shared_ptr<HostStore> store,
                        const HostOptions& options = {});

/// All stages so.
Chain with_host_variants(const Chain& chain,
                         const std::shared_ptr<HostStore>& store,
                         const HostOptions& options = {});

/// Which variant of `stage` is kOnHost, counted from 1; 0: none.
int host_variant(const Stage& stage);

class HostRun;

/// The runs of host variants that this thread begins while it lives, for as long as
/// their graphs are there. For whoever schedules them. Nests: the innermost has them.
class HostRuns {
 public:
  HostRuns();
  ~HostRuns();
  HostRuns(const HostRuns&) = delete;
  HostRuns& operator=(const HostRuns&) = delete;

  using List = std::vector<std::weak_ptr<HostRun>>;
  const List& list() const { return list_; }

 private:
  friend class HostRun;
  List list_;
  HostRuns* around_;
};

/// What they have on the host, in bytes of device memory once it is back.
int64_t host_bytes(const HostRuns::List& runs);

/// Begins to bring it back, where that has not begun.
void fetch(const HostRuns::List& runs);

}  // namespace reprise
