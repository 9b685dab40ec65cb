#include "version_text.h"

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <vector>

namespace reprise::command {
namespace {

using nlohmann::ordered_json;

/// Empty texts are null.
ordered_json text_or_null(const std::string& text) {
  return text.empty() ? ordered_json(nullptr) : ordered_json(text);
}

std::string to_json(const BuildInfo& build) {
  ordered_json libraries = ordered_json::object();
  for (const auto& [name, version] : build.libraries) {
    libraries[name] = text_or_null(version);
  }
  ordered_json cuda = nullptr;
  if (build.has_cuda) {
    cuda = {{"toolkit", text_or_null(build.cuda)},
            {"kernels", text_or_null(build.kernels)}};
  }
  return ordered_json{{"version", build.version},
                      {"commit", build.commit},
                      {"date", text_or_null(build.date)},
                      {"libtorch", build.libtorch},
                      {"cuda", cuda},
                      {"compiler", build.compiler},
                      {"standard_library", build.standard_library},
                      {"build_type", build.build_type},
                      {"sanitizer", build.sanitizer},
                      {"libraries", libraries}}
      .dump(2);
}

std::string cuda_text(const BuildInfo& build) {
  if (!build.has_cuda) return "no";
  std::string text = "yes";
  if (!build.cuda.empty()) text += ", toolkit " + build.cuda;
  return text + (build.kernels.empty() ? ", no kernels of its own"
                                       : ", kernels for " + build.kernels);
}

std::string to_text(const BuildInfo& build) {
  std::vector<std::string> libraries;
  for (const auto& [name, version] : build.libraries) {
    libraries.push_back(version.empty() ? name : name + " " + version);
  }
  std::string text = fmt::format("reprise {}", build.version);
  const auto line = [&](const char* name, const std::string& value) {
    text += fmt::format("\n{:<12}{}", name, value);
  };
  line("commit",
       build.commit + (build.date.empty() ? "" : " of " + build.date));
  line("LibTorch", build.libtorch);
  line("CUDA", cuda_text(build));
  line("compiler",
       fmt::format("{}, {}", build.compiler, build.standard_library));
  line("build type", build.sanitizer == "none"
                         ? build.build_type
                         : fmt::format("{}, sanitizer {}", build.build_type,
                                       build.sanitizer));
  line("libraries", fmt::format("{}", fmt::join(libraries, ", ")));
  return text;
}

}  // namespace

std::string version_text(const BuildInfo& build, OutputFormat format) {
  BuildInfo all = build;
  all.libraries.insert(all.libraries.begin(), {"CLI11", CLI11_VERSION});
  return format == OutputFormat::kJson ? to_json(all) : to_text(all);
}

}  // namespace reprise::command
