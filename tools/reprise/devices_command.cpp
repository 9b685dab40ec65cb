#include "commands.h"

#include <reprise/observe/devices.h>

#include <iostream>
#include <memory>
#include <string>

namespace reprise::command {

void add_devices(CLI::App& app, Action& action) {
  auto format = std::make_shared<std::string>("table");
  CLI::App* devices = app.add_subcommand(
      "devices", "List devices, and what the observer can see of them");
  devices->add_option("--format", *format, "table or json")
      ->check(CLI::IsMember({"table", "json"}))
      ->capture_default_str();
  devices->footer(
      "What is seen of a CUDA device comes from NVML (libnvidia-ml.so.1, or "
      "REPRISE_NVML).\nExit status: 0 done, 1 failed, 2 wrong usage.");
  devices->callback([format, &action] {
    action = [format] {
      const auto found = list_devices(Ask::kLibTorch);
      if (*format == "json") {
        std::cout << to_json(found) << std::endl;
      } else {
        std::cout << to_table(found) << std::flush;
      }
      return 0;
    };
  });
}

}  // namespace reprise::command
