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

/// A benchmark's command line. CLI11 does it, behind this header: its own takes ten
/// seconds to compile, in each of them.
class Options {
 public:
  using Target = std::variant<int*, int64_t*, double*, std::string*,
                              std::vector<int>*, std::vector<std::string>*>;

  explicit Options(const std::string& about);
  ~Options();
  Options(const Options&) = delete;
  Options& operator=(const Options&) = delete;

  /// What the target holds is the default; no number is below zero, of a list neither. A
  /// list's values are separate words, or have commas between them.
  Options& add(const std::string& name, Target target,
               const std::string& about);
  /// No number is below one.
  Options& add_positive(const std::string& name, Target target,
                        const std::string& about);
  /// A leading `!` in the name: the flag turns it off.
  Options& add_flag(const std::string& name, bool* target,
                    const std::string& about);
  /// `--device`
  Options& add_device(std::string* target);
  /// `--format`
  Options& add_format(std::string* target);

  /// Fills the targets. Ends the program after `--help`, and with a message where the user
  /// asks for what is not there; what the benchmark throws later, such as for a strategy
  /// that it does not know, ends it with a message too.
  void parse(int argc, char** argv);

 private:
  CLI::Option* option(const std::string& name, Target target,
                      const std::string& about, int least = 0);

  std::unique_ptr<CLI::App> app_;
};

/// `cuda` alone is the first.
c10::Device device_named(const std::string& name);

}  // namespace reprise::bench
