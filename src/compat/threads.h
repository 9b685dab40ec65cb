#pragma once

namespace reprise::compat {

/// Makes operators that this thread calls run on this thread only, for the rest
/// of its lifetime. LibTorch creates one OpenMP team of `at::get_num_threads()`
/// threads per calling thread, so that several workers would oversubscribe the
/// cores. Other threads are not affected. Has no effect if LibTorch uses its
/// own thread pool instead of OpenMP.
void run_operators_on_this_thread();

}  // namespace reprise::compat
