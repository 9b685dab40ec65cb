#pragma once

#include <reprise/memory/host_store.h>
#include <reprise/recompute/chain.h>

#include <cstdint>
#include <memory>
#include <vector>

/// Offloading of saved activations to host memory, as a variant of a stage.
///
/// The variant runs the same function, but the tensors that autograd saves are
/// copied to the host while the stage runs and copied back for its backward.
/// The device then holds only small tensors and those that are held elsewhere
/// anyway: the stage's inputs and outputs, parameters and buffers. Results are
/// bit-identical.
///
///     auto store = make_host_store(0, 8LL << 30);
///     chain = with_host_variants(chain, store);
///
/// Copies overlap with the stage. Each one starts when its tensor is saved. At
/// the end of the stage the device's stream waits for all of them, so that the
/// stage leaves no more memory on the device than its costs say. The first
/// saved tensor that the backward uses starts the copies of all tensors of that
/// run, last saved first. The schedule operation OpKind::kFetch starts them
/// earlier.
namespace reprise {

struct HostOptions {
  /// Storages smaller than this many bytes stay on the device.
  int64_t min_bytes = int64_t{1} << 20;
  /// Maximum number of concurrent copies of one stage. The device's stream
  /// waits for the oldest copy before another one starts.
  int max_in_flight = 4;
};

/// Name of the variant.
inline constexpr const char* kOnHost = "on the host";

/// Returns a copy of `stage` with the additional variant kOnHost, which is the
/// last one. Tensors for which `store` has no room stay on the device. Throws
/// c10::Error if `store` is null.
Stage with_host_variant(const Stage& stage, std::shared_ptr<HostStore> store,
                        const HostOptions& options = {});

/// Applies with_host_variant() to all stages of `chain`.
Chain with_host_variants(const Chain& chain,
                         const std::shared_ptr<HostStore>& store,
                         const HostOptions& options = {});

/// Returns the number of the variant kOnHost of `stage`, counted from 1, or 0
/// if it has none.
int host_variant(const Stage& stage);

class HostRun;

/// Collects the runs of kOnHost variants that this thread starts during the
/// object's lifetime. A run stays in the list until its autograd graph is
/// destroyed. Objects nest; runs go to the innermost one.
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
  HostRuns* outer_;
};

/// Returns the device memory, in bytes, that `runs` have moved to the host.
int64_t host_bytes(const HostRuns::List& runs);

/// Starts copying the tensors of `runs` back to the device, unless that has
/// started already. Does not wait.
void fetch(const HostRuns::List& runs);

}  // namespace reprise
