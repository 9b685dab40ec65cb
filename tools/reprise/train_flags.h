#pragma once

#include "config_options.h"

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

/// Flags of `reprise train`. Tested by tests/tools/train_command_test.sh.
namespace reprise::command {

/// Communication library of the ranks. kAuto selects it by device.
enum class Backend { kAuto, kGloo, kNccl };

/// Values of --out that are not directories.
enum class OutKeyword {
  kNone  ///< save nothing
};

/// Values of the flags of `reprise train`.
struct TrainFlags {
  TrainConfig config;
  std::string out;
  std::string resume;
  std::string export_path;
  OutputFormat format = OutputFormat::kTable;
  std::vector<std::string> compare;
  double observe_ms = 0;  ///< interval between observations; 0: none
  Backend backend = Backend::kAuto;
  double rank_timeout_s = 60;

  /// Whether saving is disabled by --out none.
  bool saves_nothing() const;
};

/// Adds the subcommand with all its flags, which write into `flags`.
CLI::App* add_train_flags(CLI::App& app, TrainFlags& flags);

/// Throws CLI::ValidationError if flags contradict each other.
void check_train_flags(const TrainFlags& flags, const CLI::App& train);

/// Completes the configuration after the flags were read.
void finish_train_flags(TrainFlags& flags);

/// Returns the configuration given by the arguments after `train` on a command
/// line, for `ranks` processes. It is resolved, except with --resume or
/// --compare. Throws CLI::Success for --help, and CLI::ValidationError or
/// c10::Error if a value is invalid.
TrainConfig parse_train_flags(const std::vector<std::string>& words,
                              int64_t ranks = 1);

}  // namespace reprise::command

template <>
struct reprise::EnumText<reprise::command::Backend> {
  static constexpr std::array<std::string_view, 3> names{"auto", "gloo",
                                                         "nccl"};
};

template <>
struct reprise::EnumText<reprise::command::OutKeyword> {
  static constexpr std::array<std::string_view, 1> names{"none"};
};
