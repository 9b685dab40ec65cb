#include "base/file.h"
#include "support.h"
#include "temporary.h"

#include <reprise/study/runner.h>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <fstream>
#include <set>
#include <sys/stat.h>

namespace reprise {
namespace {

using nlohmann::json;
using testing::TemporaryDirectory;

/// A fake command that logs its arguments and behaves according to --model.
constexpr const char* kProgram = R"sh(#!/bin/sh
echo "$*" >> "$(dirname "$0")/calls"
[ -z "$REPRISE_MEMORY_LIMIT" ] || ulimit -d $((REPRISE_MEMORY_LIMIT / 1024))
case "$*" in
  *"--model fine"*) echo '{"peak_bytes": 7, "kept_bytes": 3,
    "observed": {"samples": 2}, "series": {"t_s": [0, 1]}}' ;;
  *"--model full"*) echo '{"error": "CUDA out of memory", "out_of_memory": true}'; exit 1 ;;
  *"--model wrong"*) echo first >&2; echo 'reprise: no such thing' >&2; exit 1 ;;
  *"--model crash"*) kill -SEGV $$ ;;
  *"--model mute"*) ;;
  *"--model slow"*) exec sleep 60 ;;
  *"--model eater"*) exec python3 -c 'b = bytearray(800 << 20); print("{}")' ;;
  *"--model careless"*) exec python3 -c 'import os, signal, time
b = []
try:
    while True: b.append(bytearray(8 << 20))
except MemoryError:
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGSEGV)' ;;
esac
)sh";

class Setting {
 public:
  Setting() {
    const std::string program = base_ / "program";
    std::ofstream(program) << kProgram;
    chmod(program.c_str(), 0755);
    options.program = program;
    options.directory = base_ / "study";
    options.device_name = "a device";
    options.device_json = R"({"name":"a device"})";
    options.version = "1.2.3";
  }

  static Study study(const std::string& text) {
    return read_study(text, "test",
                      {"model", "batch", "seconds", "steps", "nesterov"});
  }

  std::vector<json> runs() const {
    std::vector<json> list;
    for (const auto& line : read_results({options.directory})) {
      json record = json::parse(line);
      if (record["type"] == "run") list.push_back(std::move(record));
    }
    return list;
  }

  int calls() const {
    std::ifstream file(base_ / "calls");
    int count = 0;
    for (std::string line; std::getline(file, line);) ++count;
    return count;
  }

  StudyOptions options;

 private:
  TemporaryDirectory base_;
};

TEST(Runner, RecordsFailuresAndContinues) {
  Setting setting;
  setting.options.timeout_s = 2;
  setting.options.memory_limit = int64_t{400} << 20;
  const Study study = Setting::study(
      "runs: [{model: [fine, full, wrong, crash, mute, slow, eater, "
      "careless]}]");
  const StudyOutcome outcome = run_study(study, setting.options);
  EXPECT_EQ(outcome.completed.done, 1);
  EXPECT_EQ(outcome.completed.oom, 2);
  EXPECT_EQ(outcome.completed.failed, 5);
  const auto runs = setting.runs();
  ASSERT_EQ(runs.size(), 8u);
  std::map<std::string, json> by_model;
  for (const json& run : runs) by_model[run["case"]["model"]] = run;
  const auto status = [&](const char* model) {
    return by_model[model]["status"].get<std::string>();
  };
  const auto reason = [&](const char* model) {
    return by_model[model]["reason"].get<std::string>();
  };
  EXPECT_EQ(status("fine"), "done");
  EXPECT_EQ(by_model["fine"]["figures"],
            (json{{"peak_bytes", 7}, {"kept_bytes", 3}}));
  EXPECT_EQ(by_model["fine"]["observed"]["samples"], 2);
  EXPECT_EQ(by_model["fine"]["series"]["t_s"].size(), 2u);
  EXPECT_TRUE(by_model["fine"]["reason"].is_null());
  EXPECT_EQ(by_model["fine"]["versions"]["reprise"], "1.2.3");
  EXPECT_EQ(by_model["fine"]["device"]["name"], "a device");
  EXPECT_EQ(status("full"), "oom");
  EXPECT_EQ(reason("full"), "CUDA out of memory");
  EXPECT_EQ(status("wrong"), "failed");
  EXPECT_EQ(reason("wrong"), "reprise: no such thing");
  EXPECT_EQ(status("crash"), "failed");
  EXPECT_NE(reason("crash").find("signal 11"), std::string::npos);
  EXPECT_EQ(reason("mute"), "ended without figures");
  EXPECT_EQ(reason("slow"), "took longer than 2 s");
  EXPECT_EQ(status("eater"), "failed");
  EXPECT_NE(reason("eater").find("MemoryError"), std::string::npos);
  // A crash at the memory limit counts as out of memory.
  EXPECT_EQ(status("careless"), "oom") << reason("careless");
}

TEST(Runner, RecordsTheCommandOfARun) {
  Setting setting;
  const Study study = Setting::study(
      "repeats: 2\nruns: [{model: fine, batch: 4, nesterov: 'true'}]");
  run_study(study, setting.options);
  const auto runs = setting.runs();
  ASSERT_EQ(runs.size(), 2u);
  EXPECT_EQ(runs[0]["command"],
            "reprise train --model fine --batch 4 --nesterov --device cpu "
            "--no-eval --observe --out none --format json");
  // A repeat uses another seed.
  EXPECT_EQ(runs[1]["command"],
            "reprise train --model fine --batch 4 --nesterov --device cpu "
            "--seed 2 --no-eval --observe --out none --format json");
}

TEST(Runner, ResumesWithoutRepeatingRuns) {
  Setting setting;
  const Study study =
      Setting::study("runs: [{model: [fine, wrong], batch: [1, 2, 3]}]");
  int asked = 0;
  setting.options.stop = [&] { return setting.calls() >= 2 && ++asked > 0; };
  const StudyOutcome first = run_study(study, setting.options);
  EXPECT_TRUE(first.stopped);
  const size_t before = setting.runs().size();
  EXPECT_GT(before, 0u);
  EXPECT_LT(before, 6u);
  // A second call without --resume is rejected.
  setting.options.stop = {};
  EXPECT_NE(testing::error_of([&] {
              run_study(study, setting.options);
            }).find("already has results; use --resume"),
            std::string::npos);
  setting.options.resume = true;
  const StudyOutcome second = run_study(study, setting.options);
  EXPECT_EQ(second.existing.total(), static_cast<int>(before));
  EXPECT_EQ(second.completed.total(), static_cast<int>(6 - before));
  EXPECT_EQ(setting.runs().size(), 6u);
  const int calls = setting.calls();
  const StudyOutcome third = run_study(study, setting.options);
  EXPECT_EQ(third.completed.total(), 0);
  EXPECT_EQ(setting.calls(), calls);
  // Failed runs are repeated only with `retry`.
  setting.options.retry = true;
  EXPECT_EQ(run_study(study, setting.options).completed.failed, 3);
  EXPECT_EQ(setting.runs().size(), 6u);
}

TEST(Runner, PartsCoverAllRuns) {
  Setting setting;
  const Study study = Setting::study("runs: [{model: fine, batch: [1, 2, 3]}]");
  setting.options.parts = 2;
  setting.options.resume = true;
  setting.options.part = 2;
  EXPECT_EQ(run_study(study, setting.options).completed.done, 1);
  setting.options.part = 1;
  EXPECT_EQ(run_study(study, setting.options).completed.done, 2);
  EXPECT_EQ(setting.runs().size(), 3u);
}

TEST(Runner, SkipsRunsThatCannotFit) {
  Setting setting;
  const Study study = Setting::study("runs: [{model: fine, batch: [1, 2, 3]}]");
  setting.options.device_memory = 1000;
  const auto outcome = run_study(
      study, setting.options,
      {TrainingPrediction{2000, 1}, TrainingPrediction{1100, 1}, std::nullopt});
  EXPECT_EQ(outcome.completed.skipped, 1);
  EXPECT_EQ(outcome.completed.done, 2);
  const auto runs = setting.runs();
  EXPECT_EQ(runs[0]["status"], "skipped");
  EXPECT_EQ(runs[0]["predicted"]["peak_bytes"], 2000);
  EXPECT_EQ(setting.calls(), 2);
}

TEST(Runner, EstimatesTheRemainingTime) {
  struct Listener : StudyListener {
    void run_started(const Run& run) override {
      left.push_back(run.remaining_s);
    }
    std::vector<double> left;
  };
  Setting setting;
  Listener listener;
  setting.options.listener = &listener;
  const Study study =
      Setting::study("runs: [{model: fine, seconds: 10, batch: [1, 2, 3]}]");
  run_study(study, setting.options);
  ASSERT_EQ(listener.left.size(), 3u);
  EXPECT_NEAR(listener.left[0], 36, 1e-9);  // 3 × (10 + 2)
  // The fake command ends immediately, so the estimate shrinks.
  EXPECT_LT(listener.left[1], 5);
  EXPECT_LT(listener.left[2], listener.left[1] + 1);
}

}  // namespace
}  // namespace reprise
