#include "compat/threads.h"

#include <ATen/Parallel.h>

#include <dlfcn.h>

namespace reprise::compat {

void run_operators_on_this_thread() {
  // Initializes LibTorch's number of threads, which would otherwise override
  // ours later.
  at::get_num_threads();
  // at::set_num_threads() would also change the default of other threads,
  // whereas OpenMP's function affects the calling thread only. It is looked up
  // dynamically, because it must be that of the OpenMP library that LibTorch
  // uses.
  using SetThreads = void (*)(int);
  static const auto set_threads =
      reinterpret_cast<SetThreads>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  if (set_threads != nullptr) set_threads(1);
}

}  // namespace reprise::compat
