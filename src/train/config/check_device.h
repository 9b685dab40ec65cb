#pragma once

#include <reprise/train/config.h>

#include <c10/core/Device.h>

namespace reprise::detail {

/// Returns the device that the options name, with its index. Throws c10::Error
/// if the machine does not have it or it does not support the precision.
/// Tested by tests/tools/wrong_inputs.py.
c10::Device check_device(const TrainOptions& options);

}  // namespace reprise::detail
