#pragma once

#include <reprise/models/model.h>

#include <string>

namespace reprise {

/// Loads all parameters and buffers of `model` from a safetensors file with the names of
/// Hugging Face or torchvision, converting types. Throws c10::Error, without changing the
/// model, on a missing tensor, an unknown tensor or a different shape; the error has the
/// name and both shapes.
///
/// Accepted: names with or without the common prefix (such as "transformer." or "bert."),
/// tied weights stored twice with equal values, constant buffers (attention masks, position
/// ids), a missing head or batch counter, and the head of another task.
void load_weights(Model& model, const std::string& path);

/// Saves all parameters and buffers with the names of the original. Tied weights are stored
/// once.
void export_weights(const Model& model, const std::string& path);

}  // namespace reprise
