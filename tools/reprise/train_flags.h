#pragma once

#include <reprise/train/config.h>

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

namespace reprise::command {

/// What `reprise train` is told.
struct TrainFlags {
  TrainConfig config;
  std::string memory;
  std::string out;
  std::string resume;
  std::string export_path;
  std::string format = "table";
  std::vector<std::string> compare;
  bool no_eval = false;
  double observe_ms = 0;  ///< 0: not observed
  std::string bucket;     ///< a size; empty: the default
  std::string backend;    ///< of ranks; empty: by the device
  double rank_timeout_s = 60;
};

/// Adds the subcommand with all its flags, which write into `flags`.
CLI::App* add_train_flags(CLI::App& app, TrainFlags& flags);

/// Throws CLI::ValidationError if flags contradict each other.
void check_train_flags(const TrainFlags& flags, const CLI::App& train);

/// After parsing: makes of the flags a resolved configuration.
void finish_train_flags(TrainFlags& flags, const CLI::App& train);

/// The training that the words after `train` on a command line ask for, for each of
/// `ranks` processes; with --resume or --compare unresolved. Throws CLI::Success for
/// --help, CLI::ValidationError and c10::Error if a value is wrong.
TrainConfig parse_train_flags(const std::vector<std::string>& words,
                              int64_t ranks = 1);

/// The flags, without dashes, that a study may set: those that decide what a
/// training does, not where it is written.
std::vector<std::string> study_keys();

}  // namespace reprise::command
