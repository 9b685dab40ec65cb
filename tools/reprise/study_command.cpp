#include "base/json_text.h"
#include "base/nearest.h"
#include "base/process.h"
#include "base/text_check.h"
#include "checks.h"
#include "commands.h"
#include "config_options.h"
#include "errors.h"
#include "field_flags.h"
#include "memory_limit.h"
#include "output.h"
#include "plugins.h"
#include "signals.h"
#include "study_progress.h"
#include "train_flags.h"

#include <reprise/base/bytes.h>
#include <reprise/base/error.h>
#include <reprise/memory/meter.h>
#include <reprise/observe/devices.h>
#include <reprise/report/report.h>
#include <reprise/study/runner.h>
#include <reprise/train/planning.h>
#include <reprise/version.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <memory>
#include <regex>

namespace reprise::command {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

/// Selects CUDA if there is a device, otherwise the CPU.
constexpr const char* kAutoDevice = "auto";

struct StudyFlags {
  std::string study = "quick";
  std::string out;
  std::string device = kAutoDevice;
  std::string part = "1/1";
  std::string run_memory;
  std::string plugin;
  OutputFormat format = OutputFormat::kTable;
  std::vector<std::string> set, only;
  bool resume = false, retry = false, dry_run = false;
  bool no_estimate = false, no_report = false, list = false;
};

/// Returns the device of the study. Does not initialize CUDA in this process.
std::string device_for(const std::string& given) {
  if (given != kAutoDevice) return given;
  for (const DeviceInfo& device : list_devices()) {
    if (device.kind == DeviceKind::kCuda && device.usable) {
      return to_text(DeviceKind::kCuda);
    }
  }
  return to_text(DeviceKind::kCpu);
}

/// Returns the configuration of a run, parsed from its command line.
TrainConfig config_of(const StudyRun& run, const StudyOptions& options) {
  std::vector<std::string> words = command_of(run, options);
  const std::string ranks = run.value("ranks");
  if (!ranks.empty()) {
    const std::string error = config_fields().find("ranks")->check(ranks);
    if (!error.empty()) {
      throw CLI::ValidationError(
          fmt::format("{}: ranks: {}", run.description(), error));
    }
  }
  const int64_t processes = ranks.empty() ? 1 : std::stoll(ranks);
  words.erase(words.begin(),
              std::find(words.begin(), words.end(), "train") + 1);
  try {
    return parse_train_flags(words, processes);
  } catch (const CLI::ParseError& error) {
    throw CLI::ValidationError(
        fmt::format("{}: {}", run.description(), error.what()));
  } catch (const c10::Error& error) {
    throw CLI::ValidationError(
        fmt::format("{}: {}", run.description(), user_message(error)));
  } catch (const Error& error) {
    throw CLI::ValidationError(
        fmt::format("{}: {}", run.description(), user_message(error)));
  }
}

/// Predicts all runs. It measures, so the process must not run anything else.
Predictions predict(const Study& study, const StudyOptions& options) {
  std::vector<TrainConfig> configs;
  for (const StudyRun& run : study.runs) {
    configs.push_back(config_of(run, options));
  }
  PlanningOptions planning;
  planning.progress = [](const std::string& text) { print_text(text + "\n"); };
  return predict_trainings(configs, planning);
}

/// Predicts all runs in a child process, so that this process does not
/// initialize CUDA or allocate LibTorch memory. A crash there loses only the
/// estimate.
Predictions predictions_from(const StudyFlags& flags,
                             const StudyOptions& options, size_t runs) {
  std::vector<std::string> words{options.program, "study",       flags.study,
                                 "--dry-run",     "--format",    "json",
                                 "--device",      options.device};
  for (const auto& one : flags.set) words.insert(words.end(), {"--set", one});
  for (const auto& one : flags.only) words.insert(words.end(), {"--only", one});
  for (const auto& one : options.flags) words.push_back(one);
  const ProcessResult result =
      run_process(words, {.memory_limit = options.memory_limit,
                          .limits_itself = true,
                          .stop = options.stop});
  const json answer = parse_json(result.out);
  Predictions predictions;
  if (!answer.is_object() || answer["runs"].size() != runs) {
    if (!result.stopped) {
      print_text(fmt::format("no estimate, the runs start without: {}\n",
                             last_line(result.error)));
    }
    return predictions;
  }
  for (const json& run : answer["runs"]) {
    predictions.emplace_back();
    const json& predicted = run["predicted"];
    if (predicted.is_object()) {
      predictions.back() = TrainingPrediction{
          predicted["peak_bytes"].get<int64_t>(), predicted["step_ms"]};
    }
  }
  return predictions;
}

ordered_json dry_run_json(const Study& study, const StudyOptions& options,
                          const Predictions& predictions) {
  ordered_json runs = ordered_json::array();
  for (size_t i = 0; i < study.runs.size(); ++i) {
    ordered_json predicted = nullptr;
    if (i < predictions.size() && predictions[i]) {
      predicted = {{"peak_bytes", predictions[i]->peak_bytes},
                   {"step_ms", predictions[i]->step_ms}};
    }
    runs.push_back({{"id", study.runs[i].id(study.name, options.device_name)},
                    {"case", json::parse(study.runs[i].case_json())},
                    {"repeat", study.runs[i].repeat},
                    {"predicted", predicted}});
  }
  return {{"study", study.name},
          {"device", options.device_name},
          {"memory_bytes", options.device_memory},
          {"runs", runs}};
}

int list_studies(const std::vector<std::string>& flags) {
  for (const auto& [name, text] : shipped_studies()) {
    const Study study = read_study(text, name, flags);
    fmt::print("{:<13}{:>4} runs  {}\n", name, study.runs.size(), study.title);
  }
  return 0;
}

std::pair<std::string, std::string> assignment(
    const std::string& text, const char* flag,
    const std::vector<std::string>& keys) {
  const size_t equals = text.find('=');
  const std::string key = text.substr(0, equals);
  if (equals == std::string::npos || equals == 0) {
    throw CLI::ValidationError(
        flag, fmt::format("expected FLAG=VALUE, got '{}'", text));
  }
  if (std::find(keys.begin(), keys.end(), key) == keys.end()) {
    throw CLI::ValidationError(
        flag, fmt::format("expected a flag of train that a study may set, got "
                          "'{}'{}",
                          key, did_you_mean(key, keys)));
  }
  return {key, text.substr(equals + 1)};
}

/// Parses a part such as "2/3".
std::pair<int, int> part_of(const std::string& text) {
  static const std::regex form("([1-9][0-9]{0,5})/([1-9][0-9]{0,5})");
  std::smatch found;
  if (std::regex_match(text, found, form)) {
    const int part = std::stoi(found[1]);
    const int parts = std::stoi(found[2]);
    if (part <= parts) return {part, parts};
  }
  throw CLI::ValidationError(
      "--part",
      fmt::format("expected I/N with I from 1 to N, such as 1/2, got '{}'",
                  text));
}

StudyOptions options_of(const StudyFlags& flags, const Study& study) {
  StudyOptions options;
  options.program = fs::read_symlink("/proc/self/exe").string();
  options.flags = plugin_words(flags.plugin);
  options.directory =
      flags.out.empty() ? "reprise-studies/" + study.name : flags.out;
  options.device = device_for(flags.device);
  const DeviceInfo info = device_info(options.device);
  if (!info.usable) {
    throw CLI::ValidationError(
        "--device", fmt::format("expected cpu, this LibTorch has no CUDA, got "
                                "{}",
                                options.device));
  }
  options.device_json = to_json(info);
  options.device_name = info.name;
  options.device_memory = info.memory_bytes;
  options.version = version();
  options.resume = flags.resume || flags.retry;
  options.retry = flags.retry;
  if (info.kind == DeviceKind::kCpu) {
    const int64_t available = available_memory();
    options.memory_limit = flags.run_memory.empty()
                               ? available - available / 10
                               : parse_bytes(flags.run_memory);
    options.device_memory = options.memory_limit;
  }
  const auto [part, parts] = part_of(flags.part);
  options.part = part;
  options.parts = parts;
  return options;
}

/// Returns the command that continues this study.
std::string resume_command(const StudyFlags& flags,
                           const StudyOptions& options) {
  std::vector<std::string> words{"reprise", "study", flags.study};
  words.insert(words.end(), options.flags.begin(), options.flags.end());
  const auto add = [&](const char* flag, const std::string& value) {
    words.insert(words.end(), {flag, value});
  };
  if (flags.device != kAutoDevice) add("--device", flags.device);
  for (const auto& one : flags.set) add("--set", one);
  for (const auto& one : flags.only) add("--only", one);
  if (options.parts > 1) add("--part", flags.part);
  if (!flags.run_memory.empty()) add("--run-memory", flags.run_memory);
  add("--out", options.directory);
  words.emplace_back("--resume");
  return shell_line(words);
}

void print_outcome(const StudyFlags& flags, const StudyOptions& options,
                   const StudyOutcome& outcome, const std::string& report) {
  const StudyCounts& a = outcome.completed;
  const StudyCounts& b = outcome.existing;
  if (flags.format == OutputFormat::kJson) {
    const auto counts = [](const StudyCounts& c) {
      return ordered_json{{"done", c.done},
                          {"oom", c.oom},
                          {"failed", c.failed},
                          {"skipped", c.skipped}};
    };
    std::cout << ordered_json{{"directory", options.directory},
                              {"stopped", outcome.stopped},
                              {"now", counts(a)},
                              {"before", counts(b)},
                              {"doubtful", outcome.with_warnings},
                              {"report", report.empty() ? ordered_json(nullptr)
                                                        : ordered_json(report)}}
                     .dump(2)
              << std::endl;
    return;
  }
  std::cout << fmt::format(
      "{} done, {} did not fit, {} failed, {} skipped{}\nresults  "
      "{}/results.jsonl\n",
      a.done, a.oom, a.failed, a.skipped,
      b.total() > 0 ? fmt::format("; {} were there before", b.total()) : "",
      options.directory);
  if (outcome.with_warnings > 0) {
    std::cout << fmt::format(
        "{} of {} runs were timed by something else than training; the report "
        "marks them\n",
        outcome.with_warnings, a.done);
  }
  if (!report.empty()) std::cout << "report   " << report << "\n";
  std::cout << std::flush;
}

/// Returns the exit status. A failed run is a result; the study fails only if
/// all runs failed.
int status_of(const StudyOutcome& outcome, const std::string& no_report) {
  if (!no_report.empty()) {
    std::cerr << "reprise: no page: " << no_report << "\n";
  }
  const int failed = outcome.completed.failed + outcome.existing.failed;
  const int all = outcome.completed.total() + outcome.existing.total();
  const bool all_failed = failed > 0 && failed == all;
  if (all_failed) {
    std::cerr << "reprise: every run has failed; results.jsonl has the "
                 "reasons, --retry runs them again\n";
  }
  if (outcome.stopped) return stopped_status();
  return all_failed || !no_report.empty() ? kFailed : kDone;
}

int study_with(const StudyFlags& flags) {
  const std::vector<std::string> keys =
      config_fields().names(&FieldInfo::in_studies);
  if (flags.list) return list_studies(keys);
  Study study = open_study(flags.study, keys);
  for (const auto& one : flags.only) {
    const auto [flag, value] = assignment(one, "--only", keys);
    try {
      study.only(flag, value);
    } catch (const CLI::Error&) {
      throw;
    } catch (const std::exception& error) {
      throw CLI::ValidationError("--only", user_message(error));
    }
  }
  for (const auto& one : flags.set) {
    const auto [flag, value] = assignment(one, "--set", keys);
    study.set(flag, value);
  }
  StudyOptions options = options_of(flags, study);
  // Check the flags of all runs before the first one starts.
  for (const StudyRun& run : study.runs) config_of(run, options);
  if (flags.dry_run) {
    apply_memory_limit();
    const Predictions predictions =
        flags.no_estimate ? Predictions{} : predict(study, options);
    if (flags.format == OutputFormat::kJson) {
      std::cout << dry_run_json(study, options, predictions).dump(2)
                << std::endl;
    } else {
      std::cout << estimate_table(study, options, predictions) << std::flush;
    }
    return 0;
  }
  const auto todo = runs_to_do(study, options);
  const std::string error = writable_directory()(options.directory);
  if (!error.empty()) throw CLI::ValidationError("--out", error);
  ignore_output_signals();
  StudyProgress progress;
  options.listener = &progress;
  options.stop = stop_on_signals();
  progress.begin(study, options, todo.size());
  Predictions predictions;
  if (!flags.no_estimate && !todo.empty()) {
    print_text(
        "measuring what they will take (--no-estimate starts at once)\n");
    predictions = predictions_from(flags, options, study.runs.size());
    progress.estimated(study, options, todo, predictions);
  }
  const StudyOutcome outcome = run_study(study, options, predictions);
  progress.end();
  std::string report;
  std::string no_report;  // error message; empty: none
  if (!flags.no_report &&
      outcome.completed.total() + outcome.existing.total() > 0) {
    report = (fs::path(options.directory) / "report.html").string();
    try {
      write_report({options.directory}, report);
    } catch (const std::exception& error) {
      // The results are complete without the report.
      no_report = user_message(error);
      report.clear();
    }
  }
  print_outcome(flags, options, outcome, report);
  if (outcome.stopped) {
    std::cerr << "stopped; go on with: " << resume_command(flags, options)
              << "\n";
  }
  return status_of(outcome, no_report);
}

/// Adds a flag that takes FLAG=VALUE and may be repeated.
void add_assignments(CLI::App& study, const char* flag,
                     std::vector<std::string>& values, const char* text) {
  std::vector<std::string> words =
      config_fields().names(&FieldInfo::in_studies);
  for (std::string& word : words) word += "=";
  set_words(study.add_option(flag, values, text)
                ->type_name("FLAG=VALUE")
                ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
                ->expected(1)
                ->allow_extra_args(false),
            words);
}

}  // namespace

void add_study(CLI::App& app, Action& action) {
  auto flags = std::make_shared<StudyFlags>();
  CLI::App* study = app.add_subcommand(
      "study",
      "Run an experiment, each training in its own process, and write a "
      "report");
  std::vector<std::string> studies;
  for (const auto& shipped : shipped_studies())
    studies.push_back(shipped.first);
  set_words(
      study
          ->add_option("STUDY", flags->study,
                       fmt::format("A study file, or a built-in study: {}",
                                   fmt::join(studies, ", ")))
          ->type_name("NAME|FILE")
          ->capture_default_str(),
      studies);
  add_plugin_flag(*study, flags->plugin);
  study->add_flag("--list", flags->list, "List the built-in studies");
  set_check(study
                ->add_option("--out", flags->out,
                             "Directory of the results (default: "
                             "reprise-studies/NAME)")
                ->type_name("DIR"),
            not_empty());
  study->add_flag("--resume", flags->resume,
                  "Continue with the existing results");
  study->add_flag("--retry", flags->retry,
                  "Continue, and repeat the runs that failed");
  study->add_flag(
      "--dry-run", flags->dry_run,
      "Show the runs and their estimated time and memory; run none");
  study->add_flag("--no-estimate", flags->no_estimate,
                  "Start without estimating time and memory of the runs");
  study->add_flag("--no-report", flags->no_report,
                  "Write no report at the end");
  CLI::Option* device =
      study
          ->add_option("--device", flags->device,
                       "Device: cpu, cuda or cuda:N; auto: CUDA if available")
          ->type_name("DEVICE")
          ->capture_default_str();
  set_check(device, device_name({kAutoDevice}));
  set_words(device, {kAutoDevice, "cpu", "cuda"});
  add_assignments(*study, "--set", flags->set,
                  "Set a flag in every run, such as seconds=1");
  add_assignments(*study, "--only", flags->only,
                  "Select the runs with this value, such as model=mlp");
  study
      ->add_option("--part", flags->part,
                   "Part of the study: I/N, every N-th run from the I-th, to "
                   "divide a study among machines")
      ->type_name("I/N")
      ->capture_default_str();
  // LibTorch itself needs this much; with less, every run would fail.
  constexpr int64_t kLeastRunMemory = int64_t{64} << 20;
  set_check(study
                ->add_option("--run-memory", flags->run_memory,
                             "Memory limit of a run on the CPU, such as 8GiB "
                             "(default: 90 % of the free memory)")
                ->type_name("SIZE"),
            byte_size(kLeastRunMemory));
  add_format_flag(*study, flags->format, "Format of the outcome");
  study->footer(
      std::string(
          "Results are appended to results.jsonl as they come; an interrupt "
          "loses only the\ncurrent run. A run that fails is a result: the "
          "study "
          "continues.\nStatus 1 also means that every run failed.\n") +
      kStatuses);
  study->callback(
      [flags, &action] { action = [flags] { return study_with(*flags); }; });
}

}  // namespace reprise::command
