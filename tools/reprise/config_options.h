#pragma once

#include "field_flags.h"

#include <reprise/base/enum_text.h>
#include <reprise/train/fields.h>

#include <CLI/CLI.hpp>
#include <torch/types.h>

#include <array>
#include <string>
#include <string_view>
#include <vector>

/// Flags that several subcommands share. Tested by tests/tools/command_test.sh.
namespace reprise::command {

/// Format of a result on standard output.
enum class OutputFormat { kTable, kJson };

/// Adds a subcommand with the flags of a training, except the flags and the
/// groups named in `without`.
CLI::App* add_configured(CLI::App& app, const char* name, const char* text,
                         TrainConfig& config,
                         const std::vector<std::string>& without = {});

/// Adds --format: table or json.
void add_format_flag(CLI::App& app, OutputFormat& format,
                     const std::string& text = "Output as table or json");

/// Returns the dataset of a training without --data: images if the model takes
/// them, otherwise random data. Throws c10::Error if the model is unknown.
std::string default_data(const TrainConfig& config);

/// Returns the device with its index. Throws CLI::ValidationError if there is
/// no such device.
torch::Device device_of(const std::string& text);

}  // namespace reprise::command

template <>
struct reprise::EnumText<reprise::command::OutputFormat> {
  static constexpr std::array<std::string_view, 2> names{"table", "json"};
};
