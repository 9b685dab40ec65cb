#include "version.h"

namespace reprise::command {

std::string version() {
  return REPRISE_VERSION;
}

}  // namespace reprise::command
