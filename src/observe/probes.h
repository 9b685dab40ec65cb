#pragma once

#include <reprise/observe/probe.h>

namespace reprise::detail {

/// The probe of this process; see make_probe("cpu").
/// Tested by tests/observe/process_probe_test.cpp.
std::unique_ptr<DeviceProbe> make_process_probe();

}  // namespace reprise::detail
