#pragma once

#include <chrono>
#include <cstdint>
#include <thread>

namespace reprise::testing {

inline void sleep_ms(int64_t milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

}  // namespace reprise::testing
