#pragma once

namespace reprise::compat {

/// From now on operators called on this thread run on it alone. LibTorch gives
/// each thread that calls it a team of its own, as large as
/// `at::get_num_threads()`: several workers would have several teams on the same
/// cores. Other threads are not affected. A LibTorch built with its own thread
/// pool instead of OpenMP has one team for all, and nothing changes there.
void run_operators_on_this_thread();

}  // namespace reprise::compat
