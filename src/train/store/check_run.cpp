// Tested by tests/tools/check_command_test.sh.
#include "base/file.h"
#include "train/store/state_files.h"
#include "train/store/state_names.h"

#include <reprise/base/bytes.h>
#include <reprise/base/error.h>
#include <reprise/memory/meter.h>
#include <reprise/train/check.h>
#include <reprise/train/run_directory.h>
#include <reprise/train/summary.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <optional>

namespace reprise {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

/// Returns the message of what `check` throws; empty if it returns.
std::string problem_of(const std::function<void()>& check) {
  try {
    check();
    return "";
  } catch (const c10::Error& error) {
    if (is_out_of_memory(error)) throw;
    return error.what_without_backtrace();
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    return error.what();
  }
}

/// Throws if a line of the first `bytes` bytes is not a JSON object.
void check_lines(const std::string& text, size_t bytes) {
  size_t from = 0;
  for (int64_t number = 1; from < bytes; ++number) {
    const size_t end = text.find('\n', from);
    TORCH_CHECK(end != std::string::npos && end < bytes, "line ", number,
                " has no end");
    const std::string line = text.substr(from, end - from);
    TORCH_CHECK(line.starts_with("{") && json::accept(line), "line ", number,
                " is not a JSON object");
    from = end + 1;
  }
}

/// Checks the files of one directory.
class Check {
 public:
  explicit Check(std::string directory) {
    result_.directory = std::move(directory);
  }

  CheckResult run(bool repair) {
    if (has("config.json")) {
      check_states(repair);
      check_text("config.json", CheckedKind::kConfig, [](const auto& text) {
        TORCH_CHECK(json::accept(text), "it is not JSON");
      });
      check_metrics();
      check_text("summary.json", CheckedKind::kSummary,
                 [](const auto& text) { summary_from_json(text); });
    }
    check_text("results.jsonl", CheckedKind::kResults, [](const auto& text) {
      // A last line without an end is removed when the study is continued.
      check_lines(text, text.rfind('\n') + 1);
    });
    check_other_tensors();
    for (const std::string& path : detail::set_aside_in(result_.directory)) {
      add(path, CheckedKind::kSetAside);
    }
    return std::move(result_);
  }

 private:
  bool has(const std::string& name) const {
    std::error_code none;
    return fs::exists(path_of(name), none);
  }
  std::string path_of(const std::string& name) const {
    return (fs::path(result_.directory) / name).string();
  }

  CheckedFile& add(const std::string& path, CheckedKind kind) {
    std::error_code none;
    const auto bytes = fs::file_size(path, none);
    result_.files.push_back({fs::path(path).filename().string(), kind,
                             none ? 0 : static_cast<int64_t>(bytes)});
    return result_.files.back();
  }

  void check_text(const std::string& name, CheckedKind kind,
                  const std::function<void(const std::string&)>& check) {
    if (!has(name)) return;
    add(path_of(name), kind).problem =
        problem_of([&] { check(read_text(path_of(name))); });
  }

  /// Checks one file of tensors. Returns whether it is whole.
  bool check_tensors(const std::string& path, CheckedKind kind) {
    CheckedFile& file = add(path, kind);
    file.problem = problem_of([&] {
      const SafeTensors tensors(path);
      file.checksums = tensors.has_checksums();
      tensors.verify();
    });
    return file.problem.empty();
  }

  void check_states(bool repair) {
    for (const std::string& state : detail::states_in(result_.directory)) {
      const size_t first = result_.files.size();
      std::string broken_part;
      check_tensors(state, CheckedKind::kState);
      for (const std::string& part : detail::parts_of(state)) {
        if (!check_tensors(part, CheckedKind::kPart)) broken_part = part;
      }
      std::string& problem = result_.files[first].problem;
      if (problem.empty()) {
        problem = problem_of([&] {
          const detail::StateFiles files(state);
          TORCH_CHECK(broken_part.empty(), "its part ", broken_part,
                      " is not whole");
          metrics_bytes_ = files.state().metrics_bytes;
        });
      }
      std::error_code none;
      if (problem.empty()) {
        result_.newest = fs::path(state).filename().string();
      } else if (!fs::exists(state, none)) {
        result_.files.resize(first);  // a training has removed it meanwhile
      } else if (repair) {
        detail::set_aside(state);  // and listed as such
        result_.files.resize(first);
      }
    }
  }

  void check_metrics() {
    const std::string name = "metrics.jsonl";
    const auto expected = static_cast<size_t>(metrics_bytes_);
    if (!has(name) && expected == 0) return;
    add(path_of(name), CheckedKind::kMetrics).problem = problem_of([&] {
      const std::string text = read_text(path_of(name));
      TORCH_CHECK(text.size() >= expected, "it has ", text.size(), " of the ",
                  expected,
                  " bytes that it had when the newest whole state was saved");
      check_lines(text, expected);
    });
  }

  void check_other_tensors() {
    std::vector<std::string> paths;
    for (const auto& entry : fs::directory_iterator(result_.directory)) {
      const std::string name = entry.path().filename().string();
      if (name.ends_with(".safetensors") && !name.starts_with("state-")) {
        paths.push_back(entry.path().string());
      }
    }
    std::sort(paths.begin(), paths.end());
    for (const std::string& path : paths) {
      check_tensors(path, CheckedKind::kTensors);
    }
  }

  CheckResult result_;
  int64_t metrics_bytes_ = 0;  // in the newest whole state
};

}  // namespace

bool CheckResult::whole() const {
  return std::all_of(files.begin(), files.end(), [](const CheckedFile& file) {
    return file.kind == CheckedKind::kSetAside || file.problem.empty();
  });
}

CheckResult check_run(const std::string& directory, bool repair) {
  std::error_code none;
  const auto has = [&](const char* name) {
    return fs::exists(fs::path(directory) / name, none);
  };
  TORCH_CHECK(has("config.json") || has("results.jsonl"), "[run] ", directory,
              " holds no run and no results (neither config.json nor "
              "results.jsonl is there)");
  std::optional<RunDirectory> lock;
  if (repair && has("config.json")) lock = RunDirectory::open(directory);
  return Check(directory).run(repair);
}

std::string to_json(const CheckResult& result) {
  ordered_json files = ordered_json::array();
  for (const CheckedFile& file : result.files) {
    files.push_back(
        {{"name", file.name},
         {"kind", to_text(file.kind)},
         {"bytes", file.bytes},
         {"checksums", file.checksums},
         {"whole", file.problem.empty()},
         {"problem", file.problem.empty() ? ordered_json(nullptr)
                                          : ordered_json(file.problem)}});
  }
  return ordered_json{
      {"directory", result.directory},
      {"whole", result.whole()},
      {"newest", result.newest.empty() ? ordered_json(nullptr)
                                       : ordered_json(result.newest)},
      {"files", files}}
      .dump(2, ' ', false, ordered_json::error_handler_t::replace);
}

std::string to_table(const CheckResult& result) {
  std::string text;
  for (const CheckedFile& file : result.files) {
    const std::string status = file.kind == CheckedKind::kSetAside ? "set aside"
                               : !file.problem.empty()
                                   ? "NOT WHOLE: " + file.problem
                               : file.checksums ? "whole, with checksums"
                                                : "whole";
    text += fmt::format("{:<44}{:>12}  {}\n", file.name,
                        format_bytes(file.bytes), status);
  }
  text += result.newest.empty()
              ? "no whole state\n"
              : fmt::format("--resume continues from {}\n", result.newest);
  return text;
}

}  // namespace reprise
