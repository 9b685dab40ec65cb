#pragma once

/// How TorchScript runs. Tested by tests/models/script_test.cpp.
namespace reprise::compat {

/// Switches TorchScript's optimizations off on this thread. The profiling executor compiles
/// other kernels after the first runs of a script, and casts differently under autocast.
class PlainScriptGuard {
 public:
  PlainScriptGuard();
  ~PlainScriptGuard();
  PlainScriptGuard(const PlainScriptGuard&) = delete;
  PlainScriptGuard& operator=(const PlainScriptGuard&) = delete;

 private:
  bool before_;
};

/// Lets exceptions propagate out of scripts with their own type, in the whole process.
/// TorchScript otherwise replaces them by std::runtime_error, and a failed allocation would
/// not be recognized. Thread-safe.
void keep_exceptions_of_scripts();

}  // namespace reprise::compat
