#include "options.h"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <cstdlib>
#include <functional>
#include <type_traits>

namespace reprise::bench {
namespace {

std::function<std::string(const std::string&)> at_least(double least) {
  return [least](const std::string& text) {
    double value = 0;
    const bool number = CLI::detail::lexical_cast(text, value);
    return number && value >= least
               ? std::string()
               : fmt::format("{}: a number of at least {}", text, least);
  };
}

}  // namespace

Options::Options(const std::string& about)
    : app_(std::make_unique<CLI::App>(about)) {}

Options::~Options() = default;

CLI::Option* Options::option(const std::string& name, Target target,
                             const std::string& about) {
  return std::visit(
      [&](auto* value) {
        CLI::Option* added = app_->add_option(name, *value, about);
        using Value = std::decay_t<decltype(*value)>;
        if constexpr (std::is_same_v<Value, std::string>) {
          return value->empty() ? added : added->capture_default_str();
        } else if constexpr (std::is_arithmetic_v<Value>) {
          return added->check(at_least(0))->capture_default_str();
        } else {
          added->delimiter(',');
          return value->empty() ? added : added->capture_default_str();
        }
      },
      target);
}

Options& Options::add(const std::string& name, Target target,
                      const std::string& about) {
  option(name, target, about);
  return *this;
}

Options& Options::add_positive(const std::string& name, Target target,
                               const std::string& about) {
  option(name, target, about)->check(at_least(1));
  return *this;
}

Options& Options::add_flag(const std::string& name, bool& target,
                           const std::string& about) {
  app_->add_flag(name, target, about);
  return *this;
}

Options& Options::add_device(std::string& target) {
  option("--device", &target, "cpu or cuda")
      ->check([](const std::string& name) -> std::string {
        try {
          const c10::Device device(name);
          if (device.is_cpu() || device.is_cuda()) return {};
        } catch (const std::exception&) {
        }
        return fmt::format("{}: cpu, cuda or cuda:N", name);
      });
  return *this;
}

Options& Options::add_format(std::string& target) {
  option("--format", &target, "table or json")
      ->check(CLI::IsMember({"table", "json"}));
  return *this;
}

void Options::parse(int argc, char** argv) {
  try {
    app_->parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app_->exit(error));
  }
}

c10::Device device_named(const std::string& name) {
  c10::Device device(name);
  if (device.is_cuda() && !device.has_index()) device.set_index(0);
  return device;
}

}  // namespace reprise::bench
