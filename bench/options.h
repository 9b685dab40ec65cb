#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace reprise::bench {

/// The command line of a benchmark. Hides CLI11, whose header takes ten seconds to
/// compile.
class Options {
 public:
  using Target = std::variant<int*, int64_t*, double*, std::string*,
                              std::vector<int>*, std::vector<std::string>*>;

  explicit Options(const std::string& about);
  ~Options();
  Options(const Options&) = delete;
  Options& operator=(const Options&) = delete;

  /// Adds an option. The value of the target is the default. Numbers must not be
  /// negative. The values of a list are separated by spaces or commas.
  Options& add(const std::string& name, Target target,
               const std::string& about);
  /// Adds an option whose numbers must be at least one.
  Options& add_positive(const std::string& name, Target target,
                        const std::string& about);
  /// Adds a flag. With a leading `!` in its name, the flag sets the target to false.
  Options& add_flag(const std::string& name, bool* target,
                    const std::string& about);
  /// Adds `--device`.
  Options& add_device(std::string* target);
  /// Adds `--format`.
  Options& add_format(std::string* target);

  /// Parses the command line into the targets. Exits after `--help` and, with a
  /// message, on invalid arguments. Exceptions that the benchmark throws later, for
  /// example for an unknown strategy, also end the program with a message.
  void parse(int argc, char** argv);

 private:
  CLI::Option* option(const std::string& name, Target target,
                      const std::string& about, int least = 0);

  std::unique_ptr<CLI::App> app_;
};

/// Parses the name of a device; "cuda" is the first CUDA device.
c10::Device device_named(const std::string& name);

}  // namespace reprise::bench
