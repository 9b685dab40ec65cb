#pragma once

#include "compat/saved_tensors.h"

#include <reprise/recompute/host_memory.h>

#include <memory>

namespace reprise::detail {

/// Moves some of the tensors that autograd saves during one run of a function to
/// a host store, for offload(). Tensors that stay on the device go to the hooks
/// that are in force when the object is made. Tested by
/// tests/recompute/keep_test.cpp.
class HostSaves {
 public:
  HostSaves(std::shared_ptr<HostStore> store, const HostOptions& options);

  /// Returns hooks that move the tensor that they pack.
  std::unique_ptr<compat::SavedTensorHooks> make_hooks() const;

  /// Call once after the function has run, while its outputs are held.
  void finish();

 private:
  std::shared_ptr<HostRun> run_;
};

}  // namespace reprise::detail
