#pragma once

namespace reprise {

/// Runs the command `reprise` with the arguments of main() and returns its exit status:
/// train, plan, profile, verify, study, report, launch and devices, for the built-in models
/// and datasets and those that were registered before (models/registry.h,
/// register_dataset()):
///
///     int main(int argc, char** argv) {
///       reprise::register_model({.name = "mine", .make = make_mine, .data = "mine"});
///       reprise::register_dataset({.name = "mine", .open = open_mine});
///       return reprise::run_command(argc, argv);
///     }
///
/// Ranks and the runs of a study are processes of the same program. Errors are printed, not
/// thrown. Must be called once.
int run_command(int argc, char** argv);

}  // namespace reprise
