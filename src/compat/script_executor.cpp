#include "compat/script_executor.h"

#include <torch/csrc/jit/python/update_graph_executor_opt.h>
#include <torch/csrc/jit/runtime/interpreter.h>

#include <mutex>

namespace reprise::compat {

PlainScriptGuard::PlainScriptGuard()
    : before_(torch::jit::getGraphExecutorOptimize()) {
  torch::jit::setGraphExecutorOptimize(false);
}

PlainScriptGuard::~PlainScriptGuard() {
  torch::jit::setGraphExecutorOptimize(before_);
}

void keep_exceptions_of_scripts() {
  static std::once_flag once;
  std::call_once(
      once, [] { FLAGS_torch_jit_enable_rethrow_caught_exception = true; });
}

}  // namespace reprise::compat
