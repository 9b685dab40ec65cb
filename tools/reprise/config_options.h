#pragma once

#include <reprise/train/config.h>

#include <CLI/CLI.hpp>
#include <torch/types.h>

#include <string>

/// What the subcommands that take a training's configuration have in common.
namespace reprise::command {

/// A subcommand with the flags of model, data, training and machine, which go to
/// `config`; what stands there is their default.
CLI::App* add_configured(CLI::App& app, const char* name, const char* text,
                         TrainConfig& config);

/// The flags of a model's sizes.
void add_model_sizes(CLI::App& app, ModelOptions& sizes);

/// For those that run whole micro-steps.
void add_graph_flag(CLI::App& app, TrainConfig& config);

/// What the model is trained on where nobody says: images, or noise. Throws
/// c10::Error on an unknown model.
std::string default_data(const TrainConfig& config);

/// With its index. Throws CLI::ValidationError where there is no such device.
torch::Device device_of(const std::string& text);

}  // namespace reprise::command
