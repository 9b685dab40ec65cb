#include "commands.h"
#include "config_options.h"
#include "errors.h"

#include <reprise/recompute/strategy.h>
#include <reprise/train/profile.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <iostream>
#include <memory>

namespace reprise::command {
namespace {

struct ProfileFlags {
  TrainConfig config;
  OutputFormat format = OutputFormat::kTable;
};

int profile_with(ProfileFlags& flags) {
  TrainConfig& config = flags.config;
  config.device = device_of(config.device).str();
  TORCH_CHECK(!config.plans_schedule(),
              "[--recompute] profile has no budget to plan for; reprise plan "
              "prints the optimal schedule, which --recompute takes as well");
  if (config.data.empty()) config.data = default_data(config);
  config.evaluate = false;
  config.resolve();
  const TrainingProfile profile = profile_training(config);
  if (flags.format == OutputFormat::kJson) {
    std::cout << to_json(profile) << std::endl;
  } else {
    std::cout << to_text(profile) << std::flush;
  }
  return 0;
}

}  // namespace

void add_profile(CLI::App& app, Action& action) {
  auto flags = std::make_shared<ProfileFlags>();
  CLI::App* profile = add_configured(
      app, "profile",
      "Show memory and time of a training by phase and by stage", flags->config,
      {"memory", "update", "Evaluation", "Ranks", "Saving"});
  profile->get_option("--recompute")
      ->description(fmt::format("{}, or a schedule as reprise plan prints it",
                                fmt::join(strategy_names(), ", ")));
  add_format_flag(*profile, flags->format);
  profile->footer(
      std::string("Runs a few updates and saves nothing. Takes the flags of "
                  "train; those that\naffect neither memory nor time are "
                  "ignored. The step is timed as train runs it,\nwith its "
                  "CUDA graph; phases and stages are measured without it.\n") +
      kStatuses);
  profile->callback(
      [flags, &action] { action = [flags] { return profile_with(*flags); }; });
}

}  // namespace reprise::command
