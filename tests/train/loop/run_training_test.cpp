#include "distributed/ranked_runs.h"
#include "train/runs.h"

#include <reprise/train/fields.h>
#include <reprise/train/run.h>

#include <torch/nn/modules/linear.h>

#include <filesystem>
#include <fstream>
#include <map>

namespace reprise {
namespace {

namespace fs = std::filesystem;
using testing::error_of;
using testing::in_ranks;
using testing::InRanks;
using testing::small;
using testing::TemporaryDirectory;

/// Parameters, buffers and optimizer state at the end of a run.
NamedTensors final_state(const std::string& path) {
  return detail::newest_state(RunDirectory::open(path),
                              [](const std::string& text) { FAIL() << text; })
      ->tensors;
}

void expect_equal(const NamedTensors& a, const NamedTensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].first, b[i].first);
    EXPECT_TRUE(torch::equal(a[i].second, b[i].second)) << a[i].first;
  }
}

/// Stops after `calls` micro-batches.
std::function<bool()> stop_after(int calls) {
  return [left = calls]() mutable { return left-- == 0; };
}

TEST(RunTraining, WritesConfigurationAndSummary) {
  const TemporaryDirectory base;
  RunOptions options;
  options.out = base / "run";
  std::string device;
  options.configured = [&](const TrainOptions& final) {
    device = final.device;
  };
  const RunResult result = run_training(small(), options);
  EXPECT_EQ(result.rank, 0);
  EXPECT_EQ(result.directory, options.out);
  EXPECT_FALSE(result.training.stopped);
  EXPECT_EQ(device, small().device);
  const TrainConfig kept =
      config_from_json(read_text(options.out + "/config.json"));
  EXPECT_EQ(kept.model, "mlp");
  EXPECT_EQ(kept.global_batch, 8);
  const TrainSummary summary =
      summary_from_json(read_text(options.out + "/summary.json"));
  EXPECT_EQ(summary.steps, result.training.summary.steps);
}

TEST(RunTraining, StatesWithTensorsOfOtherShapesAreRefused) {
  const TemporaryDirectory base;
  RunOptions part;
  part.out = base / "run";
  part.stop = stop_after(3);
  EXPECT_TRUE(run_training(small(), part).training.stopped);
  std::string path;
  std::map<std::string, std::string> metadata;
  NamedTensors tensors;
  {
    const auto saved = detail::newest_state(
        RunDirectory::open(part.out), [](const auto& text) { FAIL() << text; });
    path = saved->path;
    metadata = SafeTensors(path).metadata();
    tensors = saved->tensors;
  }
  RunOptions rest;
  rest.resume = part.out;
  int refused = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (const auto& wrong : {torch::zeros({0}), torch::zeros({2, 3, 4})}) {
      NamedTensors changed = tensors;
      if (changed[i].second.sizes() == wrong.sizes()) continue;
      changed[i].second = wrong;
      write_safetensors(path, changed, metadata);
      const std::string text =
          error_of([&] { run_training(TrainConfig(), rest); });
      EXPECT_FALSE(text.empty()) << tensors[i].first;
      EXPECT_EQ(text.find("INTERNAL ASSERT"), std::string::npos) << text;
      ++refused;
    }
  }
  EXPECT_GT(refused, 20);
  write_safetensors(path, tensors, metadata);
  EXPECT_FALSE(run_training(TrainConfig(), rest).training.stopped);
}

TEST(RunTraining, ConfigurationsThatAreWrongNameTheirFile) {
  const TemporaryDirectory base;
  RunOptions options;
  options.out = base / "run";
  run_training(small(), options);
  const std::string path = options.out + "/config.json";
  const std::string good = read_text(path);
  RunOptions resume;
  resume.resume = options.out;
  const auto with = [&](const std::string& text) {
    std::ofstream(path) << text;
    const std::string error =
        error_of([&] { run_training(TrainConfig(), resume); });
    EXPECT_NE(error.find(path), std::string::npos) << error;
    return error;
  };
  with(std::string(100'000, '['));
  with("{}");
  for (const char* batch :
       {"-1", "-9223372036854775808", "4611686018427387904"}) {
    std::string text = good;
    const std::string field = "\"batch\": 4";
    text.replace(text.find(field), field.size(),
                 std::string("\"batch\": ") + batch);
    EXPECT_NE(with(text).find("--batch: expected a whole number"),
              std::string::npos);
  }
}

TEST(RunTraining, SavesNothingWithoutADirectory) {
  const RunResult result = run_training(small());
  EXPECT_EQ(result.directory, "");
  EXPECT_EQ(result.training.summary.steps, 6);
}

TEST(RunTraining, ResumesAsIfItHadNotStopped) {
  const TemporaryDirectory base;
  RunOptions whole;
  whole.out = base / "whole";
  run_training(small(), whole);

  RunOptions part;
  part.out = base / "part";
  part.stop = stop_after(3);
  EXPECT_TRUE(run_training(small(), part).training.stopped);
  RunOptions rest;
  rest.resume = part.out;
  // Only the directory decides how the run continues.
  EXPECT_FALSE(run_training(TrainConfig(), rest).training.stopped);
  expect_equal(final_state(part.out), final_state(whole.out));
}

TEST(RunTraining, ChangesTheLengthOfASavedRun) {
  const TemporaryDirectory base;
  RunOptions options;
  options.out = base / "run";
  run_training(small(), options);
  RunOptions more;
  more.resume = options.out;
  more.changes = {{"steps", "8"}};
  const RunResult result = run_training(TrainConfig(), more);
  EXPECT_EQ(result.training.summary.steps, 8);
  EXPECT_EQ(config_from_json(read_text(options.out + "/config.json")).epochs,
            0);
}

TEST(RunTraining, PlansARunThatGetsABudget) {
  const TemporaryDirectory base;
  RunOptions options;
  options.out = base / "run";
  TrainConfig config = small();
  config.epochs = 1;
  run_training(config, options);
  RunOptions more;
  more.resume = options.out;
  more.changes = {{"epochs", "2"}, {"memory", "4GiB"}};
  EXPECT_TRUE(
      run_training(TrainConfig(), more).training.summary.predicted.has_value());
}

TEST(RunTraining, RejectsAnotherTraining) {
  const TemporaryDirectory base;
  RunOptions options;
  options.out = base / "run";
  run_training(small(), options);
  const std::string before = read_text(options.out + "/config.json");
  const auto changed = [&](std::map<std::string, std::string> changes) {
    RunOptions resume;
    resume.resume = options.out;
    resume.changes = std::move(changes);
    return error_of([&] { run_training(TrainConfig(), resume); });
  };
  EXPECT_NE(changed({{"seed", "7"}}).find("[--resume] that would be another"),
            std::string::npos);
  EXPECT_NE(changed({{"sead", "7"}}).find("'sead'"), std::string::npos);
  EXPECT_NE(changed({{"steps", "many"}}).find("[--steps]"), std::string::npos);
  EXPECT_EQ(read_text(options.out + "/config.json"), before);
}

TEST(RunTraining, RejectsDirectoriesBeforeAnyWork) {
  const TemporaryDirectory base;
  RunOptions options;
  options.out = base / "run";
  run_training(small(), options);
  bool built = false;
  const auto inputs = [&](const TrainOptions&) -> TrainInputs {
    built = true;
    return make_inputs(small());
  };
  const auto error = [&](const std::string& out, const std::string& resume) {
    RunOptions wrong;
    wrong.out = out;
    wrong.resume = resume;
    return error_of([&] { run_training(small(), inputs, wrong); });
  };
  EXPECT_NE(error(options.out, "").find("[--out]"), std::string::npos);
  std::ofstream(base / "file") << "text";
  EXPECT_NE(error(base / "file/run", "").find("is no directory"),
            std::string::npos);
  EXPECT_NE(error(base / "new", options.out).find("[--resume]"),
            std::string::npos);
  EXPECT_NE(error("", base / "nothing").find("holds no run"),
            std::string::npos);
  EXPECT_FALSE(built);
  EXPECT_FALSE(fs::exists(base / "new"));
}

TEST(RunTraining, LeavesNoDirectoryIfTheTrainingCannotBegin) {
  const TemporaryDirectory base;
  RunOptions options;
  options.out = base / "run";
  TrainConfig config = small();
  config.memory_limit = 1;
  config.recompute = "optimal";
  EXPECT_NE(
      error_of([&] { run_training(config, options); }).find("nothing fits"),
      std::string::npos);
  EXPECT_FALSE(fs::exists(options.out));
}

/// A model that is not built in: y = x W, with the sum of squared errors.
TrainInputs line_inputs(const TrainOptions& options) {
  torch::manual_seed(options.seed);
  TrainInputs inputs = make_inputs(small());
  struct Net : torch::nn::Module {
    Net() { register_module("layer", layer); }
    torch::nn::Linear layer{784, 10};
  };
  auto net = std::make_shared<Net>();
  inputs.model.name = "own";
  inputs.model.cost_key.clear();
  inputs.model.root = net;
  inputs.model.linear_parameters = nullptr;
  inputs.model.embeddings = nullptr;
  inputs.model.packed_groups = nullptr;
  inputs.model.chain = Chain({make_stage(
      "own",
      [net](const torch::Tensor& x, const torch::Tensor& targets) {
        const auto wanted = torch::one_hot(targets, 10).to(torch::kFloat);
        return (net->layer(x.flatten(1)) - wanted).pow(2).sum();
      },
      {net})});
  return inputs;
}

TEST(RunTraining, TrainsAndResumesAnOwnModel) {
  const TemporaryDirectory base;
  TrainOptions training = small();
  RunOptions whole;
  whole.out = base / "whole";
  const RunResult result = run_training(training, line_inputs, whole);
  EXPECT_EQ(result.training.summary.model, "own");
  // A name of a built-in model has no meaning for it.
  EXPECT_EQ(read_text(whole.out + "/config.json").find("\"model\""),
            std::string::npos);
  RunOptions part;
  part.out = base / "part";
  part.stop = stop_after(5);
  run_training(training, line_inputs, part);
  RunOptions rest;
  rest.resume = part.out;
  run_training(TrainOptions(), line_inputs, rest);
  expect_equal(final_state(part.out), final_state(whole.out));
}

TEST(RunTraining, GroupsOfParametersApplyAfterAResume) {
  const TemporaryDirectory base;
  TrainOptions training = small();
  training.optimizer.weight_decay = 0.5;
  const auto trained = [&](const std::string& name, bool groups) {
    TrainOptions own = training;
    if (groups) {
      own.optimizer.groups.push_back(
          {.contains = [](const std::string&,
                          const torch::Tensor& p) { return p.dim() < 2; },
           .lr_factor = 3,
           .weight_decay = 0});
    }
    RunOptions part;
    part.out = base / name;
    part.stop = stop_after(5);
    run_training(own, line_inputs, part);
    RunOptions rest;
    rest.resume = part.out;
    run_training(own, line_inputs, rest);
    return final_state(part.out);
  };
  TrainOptions grouped = training;
  RunOptions whole;
  whole.out = base / "whole";
  grouped.optimizer.groups.push_back(
      {.contains = [](const std::string&,
                      const torch::Tensor& p) { return p.dim() < 2; },
       .lr_factor = 3,
       .weight_decay = 0});
  run_training(grouped, line_inputs, whole);
  expect_equal(trained("groups", true), final_state(whole.out));
  EXPECT_FALSE(torch::equal(trained("plain", false)[0].second,
                            final_state(whole.out)[0].second));
}

TEST(RunTraining, JoinsRanksAndWritesTheirLogs) {
  const TemporaryDirectory folder;
  const auto body = [&] {
    struct Logged : TrainListener {
      explicit Logged(std::FILE* file) : log(file) {}
      void started(const Start&) override { std::fputs("started\n", log); }
      std::FILE* log;
    };
    RunOptions options;
    options.out = testing::child_folder() + "/run";
    options.backend = "gloo";
    options.listener = [](std::FILE* log) {
      return std::make_unique<Logged>(log);
    };
    const RunResult result = run_training(small(), options);
    EXPECT_EQ(result.rank, testing::child_rank());
    EXPECT_EQ(result.directory, options.out);
    EXPECT_EQ(result.training.summary.ranks, 2);
  };
  InRanks how = testing::ranks_in(folder.path(), 2);
  for (const auto& end : in_ranks(how, body)) {
    EXPECT_EQ(end.status, 0) << end.error;
  }
  EXPECT_EQ(read_text(folder / "run/rank-1.log"), "started\n");
  EXPECT_FALSE(fs::exists(folder / "run/rank-0.log"));
  EXPECT_TRUE(fs::exists(folder / "run/summary.json"));
}

TEST(RunTraining, TellsAllRanksWhichOneFailed) {
  const TemporaryDirectory folder;
  const auto body = [&] {
    const auto inputs = [](const TrainOptions&) -> TrainInputs {
      TORCH_CHECK(testing::child_rank() != 1, "no data here");
      return make_inputs(small());
    };
    RunOptions options;
    options.backend = "gloo";
    run_training(small(), inputs, options);
  };
  InRanks how = testing::ranks_in(folder.path(), 2);
  for (const auto& end : in_ranks(how, body)) {
    EXPECT_NE(end.status, 0);
    EXPECT_NE(end.error.find("no data here"), std::string::npos) << end.error;
  }
}

}  // namespace
}  // namespace reprise
