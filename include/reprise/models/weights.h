#pragma once

#include <reprise/models/model.h>

#include <string>

namespace reprise {

/// Reads every parameter and buffer of `model` from a safetensors file with
/// Hugging Face's or torchvision's names. Types are converted. Checks everything
/// first and changes the model only if all fits: a tensor that is missing, is
/// not the model's, or has another shape is a c10::Error with its name and both
/// shapes. Forgiven: a common prefix (such as "transformer." or "bert.") that is
/// there or not, tied weights that are stored twice and equal, buffers that are
/// constants (attention masks, position ids), a missing head or batch counter,
/// and the head of another task around the same body.
void load_weights(Model& model, const std::string& path);

/// Writes them, with the names of the original; tied weights once.
void export_weights(const Model& model, const std::string& path);

}  // namespace reprise
