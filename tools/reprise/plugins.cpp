#include "plugins.h"

#include "base/file.h"
#include "base/json_text.h"
#include "checks.h"
#include "errors.h"
#include "field_flags.h"

#include <reprise/base/error.h>
#include <reprise/command.h>
#include <reprise/memory/meter.h>
#include <reprise/train/fields.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <cxxabi.h>
#include <dlfcn.h>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string_view>

extern "C" {
/// Exported by programs that allow plug-ins.
extern __attribute__((visibility("default"))) const int reprise_plugin_host;
const int reprise_plugin_host = 1;
}

namespace reprise::command {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFlag = "--plugin";
constexpr const char* kTrain = "train";  // the command that continues runs
constexpr char kSeparator = ':';
constexpr uint64_t kMostPluginBytes = uint64_t{8} << 30;  // kernels are large
constexpr std::string_view kBuild = REPRISE_BUILD;
constexpr const char* kRebuild =
    "build it again with the headers of this program";

[[noreturn]] void refuse_plugin(const std::string& text) {
  throw CLI::ValidationError(kFlag, text);
}

std::vector<std::string> split(const std::string& paths) {
  std::vector<std::string> list;
  std::istringstream stream(paths);
  for (std::string path; std::getline(stream, path, kSeparator);) {
    if (!path.empty()) list.push_back(path);
  }
  return list;
}

/// Values of `flag` among the arguments: "--flag VALUE" and "--flag=VALUE".
std::vector<std::string> values_of(const std::vector<std::string>& arguments,
                                   const std::string& flag) {
  std::vector<std::string> values;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].starts_with(flag + "=")) {
      values.push_back(arguments[i].substr(flag.size() + 1));
    } else if (arguments[i] == flag && i + 1 < arguments.size()) {
      values.push_back(arguments[++i]);
    }
  }
  return values;
}

/// Directory of the run that the arguments continue; empty if there is none. Other commands
/// than train have a --resume without a value.
std::string resumed_run(const std::vector<std::string>& arguments) {
  const auto dashes = std::find(arguments.begin(), arguments.end(), "--");
  const auto first = dashes == arguments.end() ? arguments.begin() : dashes + 1;
  if (first == arguments.end() || *first != kTrain) return "";
  const auto values = values_of(arguments, "--resume");
  return values.empty() ? "" : values.back();
}

/// Plug-ins in the configuration of a run; empty if it has none or cannot be read, which is
/// reported when the run is opened.
std::string recorded_plugins(const std::string& directory) {
  std::string text;
  try {
    text = read_text((fs::path(directory) / "config.json").string());
  } catch (const Error&) {
    return "";
  }
  const auto config = parse_json(text);
  if (!config.is_object()) return "";
  const auto found = config.find("plugin");
  return found != config.end() && found->is_string() ? found->get<std::string>()
                                                     : "";
}

std::map<std::string, std::string> lines_of(std::string_view build) {
  std::map<std::string, std::string> lines;
  std::istringstream stream{std::string(build)};
  for (std::string line; std::getline(stream, line);) {
    const size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;
    lines[line.substr(0, colon)] = line.substr(colon + 2);
  }
  return lines;
}

/// Checks what the plug-in was built with, which its file contains as text. Nothing of the
/// plug-in runs.
void check_build(const std::string& path) {
  std::string bytes;
  try {
    bytes = read_text(path, kMostPluginBytes);
  } catch (const Error& error) {
    refuse_plugin(user_message(error));
  }
  const std::string_view begin = kBuild.substr(0, kBuild.find(": ") + 2);
  const size_t at = bytes.find(begin);
  if (at == std::string::npos) {
    refuse_plugin(
        fmt::format("{} is no plug-in of Reprise; it needs REPRISE_PLUGIN(…) "
                    "of reprise/command.h and reprise_add_plugin() of CMake",
                    path));
  }
  const auto built = lines_of(bytes.c_str() + at);
  std::vector<std::string> theirs, ours;
  for (const auto& [name, value] : lines_of(kBuild)) {
    const auto found = built.find(name);
    const std::string other = found == built.end() ? "unknown" : found->second;
    if (other == value) continue;
    theirs.push_back(fmt::format("{} {}", name, other));
    ours.push_back(fmt::format("{} {}", name, value));
  }
  if (theirs.empty()) return;
  refuse_plugin(fmt::format("{} was built with {}, this program with {}; {}",
                            path, fmt::join(theirs, " and "),
                            fmt::join(ours, " and "), kRebuild));
}

std::string demangled(const std::string& symbol) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(
      abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status),
      &std::free);
  return status == 0 ? text.get() : symbol;
}

/// The loader's reason as a sentence.
std::string load_error(const std::string& path, const std::string& reason) {
  constexpr std::string_view kUndefined = "undefined symbol: ";
  const size_t at = reason.find(kUndefined);
  if (at == std::string::npos) {
    return fmt::format("cannot load {}: {}", path, reason);
  }
  std::string symbol = reason.substr(at + kUndefined.size());
  symbol.resize(std::min(symbol.size(), symbol.find_first_of(", \n")));
  return fmt::format(
      "cannot load {}: it needs {}, which neither this program nor a library "
      "of the plug-in has; link the library that has it, or {}",
      path, demangled(symbol), kRebuild);
}

const detail::Plugin& open_plugin(const std::string& path) {
  // The loader would search its own folders for a name without a slash.
  void* library = dlopen(fs::absolute(path).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    refuse_plugin(load_error(path, reason != nullptr ? reason : "unknown"));
  }
  const auto* plugin =
      static_cast<const detail::Plugin*>(dlsym(library, "reprise_plugin"));
  if (plugin == nullptr) {
    refuse_plugin(fmt::format(
        "{} has no symbol reprise_plugin; REPRISE_PLUGIN(…) has to be outside "
        "of namespaces, in a file of the plug-in",
        path));
  }
  if (plugin->layout != detail::plugin_layout()) {
    refuse_plugin(
        fmt::format("{} was built with other headers of Reprise {}; {}", path,
                    REPRISE_VERSION, kRebuild));
  }
  return *plugin;
}

void register_all(const std::string& path, const detail::Plugin& plugin) {
  const auto count = [] {
    return model_list().size() + dataset_names().size();
  };
  const size_t before = count();
  try {
    plugin.register_own();
    config_fields();  // throws if an option has the name of a flag
  } catch (const std::exception& error) {
    refuse_plugin(fmt::format("{}: {}", path, user_message(error)));
  } catch (...) {
    refuse_plugin(
        fmt::format("{}: its function threw no std::exception", path));
  }
  if (count() == before) {
    refuse_plugin(fmt::format(
        "{} has registered neither a model nor a dataset in this program; does "
        "it have a copy of Reprise? Link it with reprise::plugin alone",
        path));
  }
}

void load_plugin(const std::string& given) {
  static std::set<std::string> loaded;
  std::error_code error;
  const std::string path = fs::canonical(given, error).string();
  if (error) {
    refuse_plugin(fmt::format("cannot read {}: {}", given, error.message()));
  }
  if (!loaded.insert(path).second) {
    refuse_plugin(fmt::format("{} is given twice", given));
  }
  check_build(given);
  register_all(given, open_plugin(given));
}

}  // namespace

void load_plugins(const std::vector<std::string>& arguments) {
  std::string paths =
      fmt::format("{}", fmt::join(values_of(arguments, kFlag), ":"));
  const std::string run = paths.empty() ? resumed_run(arguments) : "";
  if (!run.empty()) paths = recorded_plugins(run);
  if (paths.empty()) return;
  if (dlsym(RTLD_DEFAULT, "reprise_plugin_host") == nullptr) {
    refuse_plugin(
        "this program does not export its symbols to plug-ins; add "
        "reprise_allow_plugins(TARGET) to its CMakeLists.txt, or use the "
        "command reprise");
  }
  count_cpu_memory();  // before a plug-in makes a tensor
  for (const std::string& path : split(paths)) {
    try {
      load_plugin(path);
    } catch (const CLI::ValidationError& error) {
      if (run.empty()) throw;
      throw CLI::ValidationError(fmt::format(
          "{}; the run in {} was trained with it: give another path with {}",
          error.what(), run, kFlag));
    }
  }
}

void add_plugin_flag(CLI::App& app, std::string& paths) {
  const auto set = [&paths](const std::vector<std::string>& given) {
    std::vector<std::string> all;
    for (const auto& one : given) {
      for (const auto& path : split(one)) {
        all.push_back(fs::absolute(path).string());
      }
    }
    paths = fmt::format("{}", fmt::join(all, ":"));
  };
  CLI::Option* option = app.add_option_function<std::vector<std::string>>(
      kFlag, set,
      "Shared library with models and datasets of your own; may be repeated");
  option->group("Model")
      ->type_name("PATH")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->expected(1)
      ->allow_extra_args(false);  // a study may follow
  set_check(option, not_empty());
}

std::vector<std::string> plugin_words(const std::string& paths) {
  std::vector<std::string> words;
  for (const std::string& path : split(paths)) {
    words.insert(words.end(), {kFlag, path});
  }
  return words;
}

}  // namespace reprise::command
