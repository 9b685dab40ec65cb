#pragma once

#include <reprise/torch/saved_tensors.h>

namespace reprise {

/// While it lives, graphs built on this thread save no tensors, and so cannot
/// run backward.
class SavedNothing {
 public:
  SavedNothing();

 private:
  compat::SavedTensorScope scope_;
};

}  // namespace reprise
