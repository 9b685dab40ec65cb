#pragma once

#include <reprise/models/model.h>

#include <string>

/// Weights or adapter of a trained model. Tested by tests/train/loop/language_training_test.cpp.
namespace reprise::detail {

/// Writes the result of a training. The adapters of a model that has some (models/lora.h) go
/// to the directory `path`, unless it ends in ".safetensors"; otherwise `path` is a file for
/// all weights, with the adapters merged into them.
void export_model(const Model& model, const std::string& path);

/// Throws c10::Error or reprise::Error if export_model() could not write to `path`, before the
/// training. Tries to create a file there.
void check_export_path(const Model& model, const std::string& path);

}  // namespace reprise::detail
