#pragma once

#include "train/step/train_setup.h"

#include <reprise/models/model.h>

namespace reprise::detail {

/// Throws c10::Error if a stage trains parameters that `model.root` does not own.
/// `caller` is the name in the error.
void check_owned(const Model& model, const char* caller);

/// Runs the chain on one or two samples and throws c10::Error if it cannot be trained;
/// see check_chain() and check_loss(). Does nothing if the samples do not fit in memory.
/// The model and random generators stay as they are. Tested by
/// tests/train/loop/own_model_test.cpp.
void check_model(const TrainSetup& setup);

}  // namespace reprise::detail
