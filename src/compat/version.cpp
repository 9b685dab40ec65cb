// Tested by tests/tools/version_test.sh.
#include <reprise/version.h>

#include <build_commit.h>
#include <build_facts.h>

namespace reprise {

std::string version() {
  return REPRISE_VERSION;
}

std::string libtorch_version() {
  return std::to_string(TORCH_VERSION_MAJOR) + "." +
         std::to_string(TORCH_VERSION_MINOR) + "." +
         std::to_string(TORCH_VERSION_PATCH);
}

BuildInfo build_info() {
  BuildInfo info;
  info.version = version();
  info.commit = REPRISE_BUILD_COMMIT;
  info.date = REPRISE_BUILD_DATE;
  info.libtorch = libtorch_version();
  info.has_cuda = std::string(REPRISE_BUILD_HAS_CUDA) == "ON";
  info.cuda = REPRISE_BUILD_CUDA;
  info.kernels = REPRISE_BUILD_KERNELS;
  info.compiler = REPRISE_BUILD_COMPILER;
  info.standard_library = REPRISE_DETAIL_LIBRARY;
  info.build_type = REPRISE_BUILD_TYPE;
  info.sanitizer = REPRISE_DETAIL_SANITIZER;
  info.libraries = {REPRISE_BUILD_LIBRARIES};
  return info;
}

}  // namespace reprise
