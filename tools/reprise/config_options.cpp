#include "config_options.h"

#include "checks.h"
#include "plugins.h"

#include <reprise/models/registry.h>

#include <fmt/format.h>
#include <torch/cuda.h>

#include <algorithm>

namespace reprise::command {
namespace {

bool contains(const std::vector<std::string>& list, const std::string& text) {
  return std::find(list.begin(), list.end(), text) != list.end();
}

}  // namespace

CLI::App* add_configured(CLI::App& app, const char* name, const char* text,
                         TrainConfig& config,
                         const std::vector<std::string>& without) {
  CLI::App* command = app.add_subcommand(name, text);
  // If a flag is given twice, the last value counts, so that flags in a script
  // can be overridden.
  command->option_defaults()->multi_option_policy(
      CLI::MultiOptionPolicy::TakeLast);
  std::vector<std::string> names;
  for (const auto& field : config_fields()) {
    if (contains(without, field.group) || contains(without, field.name)) {
      names.push_back(field.name);
    }
  }
  add_fields(*command, config_fields(), config, names);
  add_plugin_flag(*command, config.plugin);
  set_check(command->get_option("--weights"), readable_weights());
  set_check(command->get_option("--adapter"), readable_adapter());
  set_check(command->get_option("--data"), data_source());
  return command;
}

void add_format_flag(CLI::App& app, OutputFormat& format,
                     const std::string& text) {
  add_choice(app, "--format", format, text)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
}

std::string default_data(const TrainConfig& config) {
  const ModelEntry& model = model_entry(config.model);
  if (!model.data.empty()) return model.data;
  const bool images =
      model.task == Task::kImages || model.task == Task::kPixels;
  return images ? "mnist" : "random";
}

torch::Device device_of(const std::string& text) {
  const std::string error = device_name()(text);
  if (!error.empty()) throw CLI::ValidationError("--device", error);
  torch::Device device(text);
  if (device.is_cuda() && !device.has_index()) device.set_index(0);
  const int count = static_cast<int>(torch::cuda::device_count());
  if (device.is_cuda() && device.index() >= count) {
    throw CLI::ValidationError(
        "--device",
        count == 0
            ? fmt::format("expected cpu, no CUDA devices are here, got {}",
                          text)
            : fmt::format("expected one of {} CUDA devices, cuda:0 to cuda:{}, "
                          "got {}",
                          count, count - 1, text));
  }
  return device;
}

}  // namespace reprise::command
