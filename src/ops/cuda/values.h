#pragma once

namespace reprise::kernels {

/// Types of values in memory.
enum class Values { kNone, kSingle, kBfloat16, kHalf };

}  // namespace reprise::kernels
