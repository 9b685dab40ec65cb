#pragma once

#include <reprise/train/config.h>

#include <CLI/CLI.hpp>
#include <torch/types.h>

#include <string>

/// What the subcommands that take a training's configuration have in common.
namespace reprise::command {

/// Adds a subcommand with the flags of model, data, training and machine, which
/// write into `config`; its values are their defaults. Each flag refuses values that
/// its field may not have.
CLI::App* add_configured(CLI::App& app, const char* name, const char* text,
                         TrainConfig& config);

/// Adds the flags of a model's sizes.
void add_model_sizes(CLI::App& app, ModelOptions& sizes);

/// Adds --graph, for subcommands that run whole micro-steps.
void add_graph_flag(CLI::App& app, TrainConfig& config);

/// Adds --memory; `text` begins its help.
CLI::Option* add_memory_flag(CLI::App& app, std::string& memory,
                             const std::string& text);

/// Adds --format: table or json.
void add_format_flag(CLI::App& app, std::string& format,
                     const std::string& text = "Output as table or json");

/// The data a model is trained on if --data is not given: images, or noise. Throws
/// c10::Error on an unknown model.
std::string default_data(const TrainConfig& config);

/// With its index. Throws CLI::ValidationError if there is no such device.
torch::Device device_of(const std::string& text);

}  // namespace reprise::command
