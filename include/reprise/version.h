#pragma once

#include <torch/version.h>

#include <string>
#include <utility>
#include <vector>

/// Version of Reprise. CMakeLists.txt reads it here.
#define REPRISE_VERSION "0.1.0"

namespace reprise {

/// Version of Reprise, such as "0.1.0".
std::string version();

/// Version of the LibTorch that Reprise was built with, such as "1.13.1".
std::string libtorch_version();

/// How Reprise was built.
struct BuildInfo {
  std::string version;  ///< version()
  std::string
      commit;  ///< ends in "-modified" if files were changed, or "unknown"
  std::string date;  ///< of the commit, such as "2026-11-18"; empty: unknown
  std::string libtorch;   ///< libtorch_version()
  bool has_cuda = false;  ///< whether LibTorch has CUDA
  std::string cuda;     ///< version of the CUDA toolkit; empty: unknown or none
  std::string kernels;  ///< GPUs with kernels of their own; empty: none
  std::string compiler;          ///< such as "GNU 12.2.0"
  std::string standard_library;  ///< with the form of its ABI
  std::string build_type;        ///< CMAKE_BUILD_TYPE
  std::string sanitizer;         ///< address, thread or none
  /// Name and version of the other libraries.
  std::vector<std::pair<std::string, std::string>> libraries;
};

/// How this library was built; `reprise --version` prints it.
BuildInfo build_info();

}  // namespace reprise

#define REPRISE_DETAIL_QUOTE(text) #text
#define REPRISE_DETAIL_TEXT(macro) REPRISE_DETAIL_QUOTE(macro)

#if defined(_LIBCPP_ABI_VERSION)
#define REPRISE_DETAIL_LIBRARY \
  "libc++ with ABI " REPRISE_DETAIL_TEXT(_LIBCPP_ABI_VERSION)
#elif defined(_GLIBCXX_DEBUG)
#define REPRISE_DETAIL_LIBRARY         \
  "libstdc++ with _GLIBCXX_DEBUG and " \
  "_GLIBCXX_USE_CXX11_ABI=" REPRISE_DETAIL_TEXT(_GLIBCXX_USE_CXX11_ABI)
#else
#define REPRISE_DETAIL_LIBRARY                                  \
  "libstdc++ with _GLIBCXX_USE_CXX11_ABI=" REPRISE_DETAIL_TEXT( \
      _GLIBCXX_USE_CXX11_ABI)
#endif

#if defined(__has_feature)
#define REPRISE_DETAIL_HAS(feature) __has_feature(feature)
#else
#define REPRISE_DETAIL_HAS(feature) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || REPRISE_DETAIL_HAS(address_sanitizer)
#define REPRISE_DETAIL_SANITIZER "address"
#elif defined(__SANITIZE_THREAD__) || REPRISE_DETAIL_HAS(thread_sanitizer)
#define REPRISE_DETAIL_SANITIZER "thread"
#else
#define REPRISE_DETAIL_SANITIZER "none"
#endif

/// Everything that a plug-in and the program that loads it must have been compiled with
/// alike, one "name: value" per line. The program finds the text in the file of a plug-in,
/// before it loads it.
#define REPRISE_BUILD \
  "reprise plug-in, form: 1\n"                                       \
  "Reprise: " REPRISE_VERSION "\n"                                   \
  "LibTorch: " REPRISE_DETAIL_TEXT(TORCH_VERSION_MAJOR) "."          \
  REPRISE_DETAIL_TEXT(TORCH_VERSION_MINOR) "."                       \
  REPRISE_DETAIL_TEXT(TORCH_VERSION_PATCH) "\n"                      \
  "standard library: " REPRISE_DETAIL_LIBRARY "\n"                   \
  "C++ ABI: " REPRISE_DETAIL_TEXT(__GXX_ABI_VERSION) "\n"            \
  "sanitizer: " REPRISE_DETAIL_SANITIZER "\n"
