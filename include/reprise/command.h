#pragma once

#include <reprise/data/dataset.h>
#include <reprise/models/registry.h>
#include <reprise/version.h>

#include <cstdint>

namespace reprise {

/// Runs the command `reprise` with the arguments of main() and returns its exit status. All
/// subcommands know the built-in models and datasets and those that `register_own` registers
/// (models/registry.h, register_dataset()):
///
///     void register_mine() {
///       reprise::register_model({.name = "mine", .make = make_mine, .data = "mine"});
///       reprise::register_dataset({.name = "mine", .open = open_mine});
///     }
///
///     int main(int argc, char** argv) {
///       return reprise::run_command(argc, argv, register_mine);
///     }
///
/// They may also be registered before, and `register_own` may be null. Ranks and the runs of
/// a study are processes of the same program. Errors are printed, not thrown. Must be called
/// once.
int run_command(int argc, char** argv, void (*register_own)() = nullptr);

namespace detail {

/// The symbol `reprise_plugin` of a plug-in.
struct Plugin {
  const char* build;  ///< REPRISE_BUILD
  uint64_t layout;    ///< plugin_layout()
  void (*register_own)();
};

/// A number that differs if the types that a plug-in and a program exchange do.
constexpr uint64_t plugin_layout() {
  uint64_t number = 0;
  for (const size_t size :
       {sizeof(ModelEntry), sizeof(OwnOption), sizeof(ModelOptions),
        sizeof(Model), sizeof(Chain), sizeof(Stage), sizeof(DatasetEntry),
        sizeof(DataOptions), sizeof(Dataset), sizeof(Batch)}) {
    number = number * 4099 + size;
  }
  return number;
}

}  // namespace detail
}  // namespace reprise

/// Makes a shared library a plug-in of the command. `function`, a void(), registers models
/// and datasets when `reprise --plugin` loads it. Once per library, outside of namespaces:
///
///     REPRISE_PLUGIN(register_mine);
///
/// The command refuses a plug-in that was built with another version of Reprise or LibTorch
/// or with another C++ ABI. CMake's reprise_add_plugin(mine mine.cpp) builds it.
#define REPRISE_PLUGIN(function)                                  \
  extern "C" {                                                    \
  extern __attribute__((visibility("default")))                   \
  const reprise::detail::Plugin reprise_plugin;                   \
  const reprise::detail::Plugin reprise_plugin = {                \
      REPRISE_BUILD, reprise::detail::plugin_layout(), function}; \
  }                                                               \
  static_assert(true)

/// Makes a source file a program or a plug-in: a program with main(), which is the command
/// with the models and datasets that `function` registers, if it is linked with
/// reprise::command; a plug-in, if it is built by reprise_add_plugin().
#ifdef REPRISE_AS_PLUGIN
#define REPRISE_COMMAND(function) REPRISE_PLUGIN(function)
#else
#define REPRISE_COMMAND(function)                      \
  int main(int argc, char** argv) {                    \
    return reprise::run_command(argc, argv, function); \
  }                                                    \
  static_assert(true)
#endif
