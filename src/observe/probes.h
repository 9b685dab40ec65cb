#pragma once

#include <reprise/observe/probe.h>

namespace reprise::detail {

/// This process, as make_probe("cpu") gives it.
std::unique_ptr<DeviceProbe> make_process_probe();

}  // namespace reprise::detail
