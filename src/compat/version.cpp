// Tested by tests/tools/command_test.sh.
#include <reprise/version.h>

namespace reprise {

std::string version() {
  return REPRISE_VERSION;
}

std::string libtorch_version() {
  return std::to_string(TORCH_VERSION_MAJOR) + "." +
         std::to_string(TORCH_VERSION_MINOR) + "." +
         std::to_string(TORCH_VERSION_PATCH);
}

}  // namespace reprise
