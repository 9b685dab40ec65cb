#pragma once

#include "compat/saved_tensors.h"

namespace reprise {

/// During its lifetime, autograd graphs built on this thread save no tensors
/// and therefore cannot run backward. Tested by
/// tests/recompute/execution_test.cpp.
class NoSaveScope {
 public:
  NoSaveScope();

 private:
  compat::SavedTensorScope scope_;
};

}  // namespace reprise
