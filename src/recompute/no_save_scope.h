#pragma once

#include "compat/saved_tensors.h"

namespace reprise {

/// While it lives, graphs built on this thread save no tensors, and so cannot
/// run backward.
class NoSaveScope {
 public:
  NoSaveScope();

 private:
  compat::SavedTensorScope scope_;
};

}  // namespace reprise
