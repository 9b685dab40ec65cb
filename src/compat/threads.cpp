#include "compat/threads.h"

#include <ATen/Parallel.h>

#include <dlfcn.h>

namespace reprise::compat {

void run_operators_on_this_thread() {
  // LibTorch's first look would put its own number back.
  at::get_num_threads();
  // at::set_num_threads() also changes what other threads begin with; OpenMP's
  // own function is for the calling thread. It is looked up because it must be
  // that of LibTorch's OpenMP library, whichever that is.
  using SetThreads = void (*)(int);
  static const auto set_threads =
      reinterpret_cast<SetThreads>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  if (set_threads != nullptr) set_threads(1);
}

}  // namespace reprise::compat
