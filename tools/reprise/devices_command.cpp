#include "commands.h"
#include "config_options.h"
#include "errors.h"

#include <reprise/observe/devices.h>

#include <iostream>
#include <memory>
#include <string>

namespace reprise::command {

void add_devices(CLI::App& app, Action& action) {
  auto format = std::make_shared<OutputFormat>(OutputFormat::kTable);
  CLI::App* devices = app.add_subcommand(
      "devices", "List devices, and what the observer can see of them");
  add_format_flag(*devices, *format);
  devices->footer(std::string("What is seen of a CUDA device comes from NVML "
                              "(libnvidia-ml.so.1, or REPRISE_NVML).\n") +
                  kStatuses);
  devices->callback([format, &action] {
    action = [format] {
      const auto found = list_devices(DeviceQuery::kLibTorch);
      if (*format == OutputFormat::kJson) {
        std::cout << to_json(found) << std::endl;
      } else {
        std::cout << to_table(found) << std::flush;
      }
      return 0;
    };
  });
}

}  // namespace reprise::command
