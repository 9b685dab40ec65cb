#include "base/json_text.h"
#include "base/process.h"
#include "study/record_type.h"

#include <reprise/base/bytes.h>
#include <reprise/observe/devices.h>
#include <reprise/study/runner.h>
#include <reprise/train/fields.h>
#include <reprise/version.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <map>
#include <unistd.h>

namespace reprise {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

constexpr double kStartUpS = 2;  // start of a process, LibTorch and a device
constexpr double kSkipFactor = 1.25;  // larger than the error of a prediction
constexpr double kNearLimit = 0.85;   // fraction of the memory limit

std::string now_utc() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof name - 1) == 0 ? name : "";
}

std::string results_path(const StudyOptions& options) {
  return (fs::path(options.directory) / "results.jsonl").string();
}

/// The status of every run in the results, by id; none if the status is unknown.
using KnownRuns = std::map<std::string, std::optional<RunStatus>>;

KnownRuns known_runs(const StudyOptions& options) {
  KnownRuns known;
  std::error_code none;
  if (!fs::exists(results_path(options), none)) return known;
  for (const auto& line : read_results({options.directory})) {
    const json record = parse_json(line);
    if (detail::record_type(record) == detail::RecordType::kRun) {
      const auto status = record.find("status");
      known[record["id"]] =
          status != record.end() && status->is_string()
              ? try_from_text<RunStatus>(status->get<std::string>())
              : std::nullopt;
    }
  }
  return known;
}

bool has_result(const KnownRuns& known, const std::string& id,
                const StudyOptions& options) {
  const auto found = known.find(id);
  return found != known.end() &&
         !(options.retry && found->second == RunStatus::kFailed);
}

void count(StudyCounts& counts, RunStatus status) {
  switch (status) {
    case RunStatus::kDone:
      ++counts.done;
      break;
    case RunStatus::kOom:
      ++counts.oom;
      break;
    case RunStatus::kFailed:
      ++counts.failed;
      break;
    case RunStatus::kSkipped:
      ++counts.skipped;
      break;
  }
}

/// How a run ended, and its results.
struct RunEnd {
  RunStatus status = RunStatus::kFailed;
  std::string reason;
  json figures = nullptr, observed = nullptr, series = nullptr;
};

json extract(json& object, const char* key) {
  if (!object.contains(key)) return nullptr;
  json value = std::move(object[key]);
  object.erase(key);
  return value;
}

RunEnd classify(const ProcessResult& result, int64_t memory_limit,
                double timeout_s) {
  RunEnd end;
  json out = parse_json(result.out);
  if (result.status == 0 && out.is_object() && !out.contains("error")) {
    end.status = RunStatus::kDone;
    end.observed = extract(out, "observed");
    end.series = extract(out, "series");
    end.figures = std::move(out);
    return end;
  }
  const bool at_limit =
      memory_limit > 0 && static_cast<double>(result.rss_peak_bytes) >
                              kNearLimit * static_cast<double>(memory_limit);
  if (result.timed_out) {
    end.reason = fmt::format("took longer than {:g} s", timeout_s);
  } else if (out.is_object() && out.contains("error")) {
    end.reason = out["error"].get<std::string>();
    if (out.value("out_of_memory", false)) end.status = RunStatus::kOom;
  } else if (result.killed_for_memory) {
    end.status = RunStatus::kOom;
    end.reason = "killed by the system, which ran out of memory";
  } else if (result.signal != 0) {
    end.reason = fmt::format("ended by signal {} ({})", result.signal,
                             strsignal(result.signal));
    if (at_limit) {
      // Not all libraries check the result of malloc.
      end.status = RunStatus::kOom;
      end.reason += fmt::format(" with {} of its limit of {} in use",
                                format_bytes(result.rss_peak_bytes),
                                format_bytes(memory_limit));
    }
  } else if (result.status == 0) {
    end.reason = "ended without figures";
  } else {
    end.reason = last_line(result.error);
    if (end.reason.empty()) {
      end.reason = fmt::format("exit status {}", result.status);
    }
  }
  return end;
}

class Runner {
 public:
  Runner(const Study& study, const StudyOptions& options,
         const std::vector<std::optional<TrainingPrediction>>& predictions)
      : study_(study),
        options_(options),
        predictions_(predictions),
        todo_(runs_to_do(study, options)),
        file_(options.directory) {
    const auto known = known_runs(options);
    for (const StudyRun& run : study.runs) {
      const auto found = known.find(run.id(study.name, options.device_name));
      if (found != known.end() && found->second) {
        count(outcome_.existing, *found->second);
      }
    }
  }

  StudyOutcome run() {
    if (!todo_.empty()) file_.append(head());
    for (size_t i = 0; i < todo_.size(); ++i) {
      if (options_.stop && options_.stop()) outcome_.stopped = true;
      if (outcome_.stopped) break;
      run_one(i);
    }
    return outcome_;
  }

 private:
  std::string head() const {
    return ordered_json{{"type", to_text(detail::RecordType::kStudy)},
                        {"study", study_.name},
                        {"title", study_.title},
                        {"question", study_.question},
                        {"views", study_.views},
                        {"runs", study_.runs.size()},
                        {"file", study_.text},
                        {"reference", json::parse(study_.reference)},
                        {"started", now_utc()}}
        .dump();
  }

  std::optional<TrainingPrediction> prediction(size_t index) const {
    return index < predictions_.size() ? predictions_[index] : std::nullopt;
  }

  /// The expected duration of the remaining runs, scaled by the ratio of actual to
  /// expected duration so far.
  double remaining_s(size_t from) const {
    double expected = 0;
    for (size_t i = from; i < todo_.size(); ++i) {
      expected += expected_seconds(study_.runs[todo_[i]], prediction(todo_[i]));
    }
    const double ratio =
        expected_so_far_s_ > 0 ? elapsed_s_ / expected_so_far_s_ : 1;
    return expected * ratio;
  }

  void run_one(size_t position) {
    const size_t index = todo_[position];
    const StudyRun& run = study_.runs[index];
    const auto predicted = prediction(index);
    StudyListener::RunResult ended;
    ended.run = {static_cast<int>(position) + 1, static_cast<int>(todo_.size()),
                 run.description(study_.constant), remaining_s(position)};
    if (options_.listener != nullptr) {
      options_.listener->run_started(ended.run);
    }
    const std::string started = now_utc();
    RunEnd end;
    if (too_large(predicted)) {
      end.status = RunStatus::kSkipped;
      end.reason = fmt::format("predicted peak {}, the device has {}",
                               format_bytes(predicted->peak_bytes),
                               format_bytes(options_.device_memory));
    } else {
      const double timeout =
          study_.timeout_s > 0 ? study_.timeout_s : options_.timeout_s;
      const bool cpu = device_kind(device_of(run)) == DeviceKind::kCpu;
      const int64_t limit = cpu ? options_.memory_limit : 0;
      const ProcessResult result =
          run_process(command_of(run, options_), {.timeout_s = timeout,
                                                  .memory_limit = limit,
                                                  .limits_itself = true,
                                                  .stop = options_.stop});
      if (result.stopped) {
        outcome_.stopped = true;
        return;  // no result, so that --resume repeats the run
      }
      end = classify(result, limit, timeout);
      ended.wall_s = result.wall_s;
      elapsed_s_ += result.wall_s;
      expected_so_far_s_ += expected_seconds(run, predicted);
    }
    file_.append(record(run, predicted, end, started, ended.wall_s));
    count(outcome_.completed, end.status);
    if (end.figures.is_object() &&
        !end.figures.value("warnings", json::array()).empty()) {
      ++outcome_.with_warnings;
    }
    notify(ended, end);
  }

  bool too_large(const std::optional<TrainingPrediction>& predicted) const {
    return predicted && options_.device_memory > 0 &&
           static_cast<double>(predicted->peak_bytes) >
               kSkipFactor * static_cast<double>(options_.device_memory);
  }

  std::string device_of(const StudyRun& run) const {
    const std::string own = run.value("device");
    return own.empty() ? options_.device : own;
  }

  std::string record(const StudyRun& run,
                     const std::optional<TrainingPrediction>& predicted,
                     const RunEnd& end, const std::string& started,
                     double wall_s) const {
    ordered_json r;
    r["type"] = to_text(detail::RecordType::kRun);
    r["id"] = run.id(study_.name, options_.device_name);
    r["study"] = study_.name;
    r["system"] = "reprise";
    r["case"] = json::parse(run.case_json());
    r["label"] = run.label.empty() ? json(nullptr) : json(run.label);
    r["repeat"] = run.repeat;
    r["status"] = to_text(end.status);
    r["reason"] = end.reason.empty() ? json(nullptr) : json(end.reason);
    r["predicted"] = nullptr;
    if (predicted) {
      r["predicted"] = {{"peak_bytes", predicted->peak_bytes},
                        {"step_ms", predicted->step_ms}};
    }
    r["figures"] = end.figures;
    r["observed"] = end.observed;
    r["series"] = end.series;
    r["device"] = options_.device_json.empty()
                      ? json(nullptr)
                      : json::parse(options_.device_json);
    r["versions"] = {{"reprise", options_.version},
                     {"libtorch", libtorch_version()}};
    r["host"] = host_name();
    auto words = command_of(run, options_);
    words[0] = "reprise";
    r["command"] = shell_line(words);
    r["started"] = started;
    r["wall_s"] = std::round(wall_s * 1000) / 1000;
    return r.dump(-1, ' ', false, json::error_handler_t::replace);
  }

  void notify(StudyListener::RunResult& ended, const RunEnd& end) const {
    if (options_.listener == nullptr) return;
    ended.status = end.status;
    ended.reason = end.reason;
    if (end.figures.is_object()) {
      ended.peak_bytes = end.figures.value("peak_bytes", int64_t{0});
      ended.kept_bytes = end.figures.value("kept_bytes", int64_t{0});
      ended.samples_per_s = end.figures.value("samples_per_s", 0.0);
      ended.warnings =
          end.figures.value("warnings", std::vector<std::string>());
    }
    options_.listener->run_ended(ended);
  }

  const Study& study_;
  const StudyOptions& options_;
  const std::vector<std::optional<TrainingPrediction>>& predictions_;
  std::vector<size_t> todo_;
  ResultsFile file_;
  StudyOutcome outcome_;
  double elapsed_s_ = 0, expected_so_far_s_ = 0;
};

double number_of(const StudyRun& run, const char* flag, double other) {
  const std::string text = run.value(flag);
  return text.empty() ? other : std::strtod(text.c_str(), nullptr);
}

}  // namespace

std::vector<std::string> command_of(const StudyRun& run,
                                    const StudyOptions& options) {
  std::vector<std::string> words{options.program};
  const std::string ranks = run.value("ranks");
  if (!ranks.empty()) {
    for (const char* word : {"launch", "-n", ranks.c_str(), "--"}) {
      words.emplace_back(word);
    }
  }
  words.emplace_back("train");
  words.insert(words.end(), options.flags.begin(), options.flags.end());
  const auto add = [&](const std::string& flag, const std::string& value) {
    words.push_back("--" + flag);
    words.push_back(value);
  };
  for (const auto& [flag, value] : run.values) {
    const FieldInfo* field = config_fields().find(flag);
    if (field != nullptr && !field->on_command_line) continue;  // launch's
    if (field != nullptr && field->kind == FieldKind::kFlag) {
      const bool on = value == detail::value_text(true);
      words.push_back(on ? "--" + flag : fmt::format("--{}={}", flag, value));
    } else {
      add(flag, value);
    }
  }
  if (run.value("device").empty()) add("device", options.device);
  // Repeats start from different weights.
  if (run.repeat > 1 && run.value("seed").empty()) {
    add("seed", std::to_string(run.repeat));
  }
  const bool evaluates =
      !run.value("eval-every").empty() || !run.value("no-eval").empty();
  if (!evaluates) words.push_back("--no-eval");
  for (const char* word : {"--observe", "--out", "none", "--format", "json"}) {
    words.emplace_back(word);
  }
  return words;
}

double expected_seconds(const StudyRun& run,
                        const std::optional<TrainingPrediction>& prediction) {
  const double step_s = prediction ? prediction->step_ms / 1000 : 0;
  const double seconds = number_of(run, "seconds", 0);
  if (seconds > 0) return kStartUpS + std::max(seconds, 4 * step_s);
  const double steps = number_of(run, "steps", 50);
  return kStartUpS + (prediction ? steps * step_s : 5);
}

std::vector<size_t> runs_to_do(const Study& study,
                               const StudyOptions& options) {
  TORCH_CHECK(
      options.parts >= 1 && options.part >= 1 && options.part <= options.parts,
      "[study] expected a part such as 1/2, got ", options.part, "/",
      options.parts);
  const auto known = known_runs(options);
  TORCH_CHECK(known.empty() || options.resume, "[study] ", options.directory,
              " already has results; use --resume to continue, or --out DIR to "
              "start elsewhere");
  std::vector<size_t> todo;
  for (size_t i = 0; i < study.runs.size(); ++i) {
    if (static_cast<int>(i) % options.parts != options.part - 1) continue;
    const std::string id = study.runs[i].id(study.name, options.device_name);
    if (!has_result(known, id, options)) todo.push_back(i);
  }
  return todo;
}

StudyOutcome run_study(
    const Study& study, const StudyOptions& options,
    const std::vector<std::optional<TrainingPrediction>>& predictions) {
  return Runner(study, options, predictions).run();
}

}  // namespace reprise
