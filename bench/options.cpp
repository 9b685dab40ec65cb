#include "options.h"

#include "compat/cuda.h"

#include <CLI/CLI.hpp>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <type_traits>

namespace reprise::bench {
namespace {

std::function<std::string(const std::string&)> at_least(int least) {
  return [least](const std::string& text) {
    double value = 0;
    const bool number = CLI::detail::lexical_cast(text, value);
    return number && value >= least
               ? std::string()
               : fmt::format("{}: expected a number of at least {}", text,
                             least);
  };
}

/// Prints the message of an uncaught exception without LibTorch's backtrace.
[[noreturn]] void end_with_message() {
  std::fflush(nullptr);  // prints the rows so far first
  try {
    if (const auto thrown = std::current_exception()) {
      std::rethrow_exception(thrown);
    }
  } catch (const c10::Error& error) {
    fmt::print(stderr, "error: {}\n", error.what_without_backtrace());
    std::_Exit(1);
  } catch (const std::exception& error) {
    fmt::print(stderr, "error: {}\n", error.what());
    std::_Exit(1);
  } catch (...) {
  }
  std::abort();
}

}  // namespace

Options::Options(const std::string& about)
    : app_(std::make_unique<CLI::App>(about)) {}

Options::~Options() = default;

CLI::Option* Options::option(const std::string& name, Target target,
                             const std::string& about, int least) {
  return std::visit(
      [&](auto* value) {
        using Value = std::decay_t<decltype(*value)>;
        CLI::Option* added = app_->add_option(name, *value, about);
        bool has_default = true;
        if constexpr (!std::is_arithmetic_v<Value>)
          has_default = !value->empty();
        if (has_default) added->capture_default_str();
        constexpr bool list = std::is_same_v<Value, std::vector<int>> ||
                              std::is_same_v<Value, std::vector<std::string>>;
        if constexpr (list) added->delimiter(',');
        if constexpr (std::is_arithmetic_v<Value> ||
                      std::is_same_v<Value, std::vector<int>>) {
          added->check(at_least(least));
        }
        return added;
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
  option(name, target, about, 1);
  return *this;
}

Options& Options::add_flag(const std::string& name, bool* target,
                           const std::string& about) {
  app_->add_flag(name, *target, about);
  return *this;
}

Options& Options::add_device(std::string* target) {
  option("--device", target, "cpu or cuda")
      ->check([](const std::string& name) -> std::string {
        try {
          const c10::Device device = device_named(name);
          if (device.is_cpu()) return {};
          if (device.is_cuda()) {
            const int count = compat::cuda_device_count();
            if (device.index() < count) return {};
            return fmt::format("{}: there are {} CUDA devices", name, count);
          }
        } catch (const c10::Error&) {
        }
        return fmt::format("{}: expected cpu, cuda or cuda:N", name);
      });
  return *this;
}

Options& Options::add_format(std::string* target) {
  option("--format", target, "table or json")
      ->check(CLI::IsMember({"table", "json"}));
  return *this;
}

void Options::parse(int argc, char** argv) {
  try {
    app_->parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app_->exit(error));
  }
  std::set_terminate(end_with_message);
}

c10::Device device_named(const std::string& name) {
  c10::Device device(name);
  if (device.is_cuda() && !device.has_index()) device.set_index(0);
  return device;
}

}  // namespace reprise::bench
