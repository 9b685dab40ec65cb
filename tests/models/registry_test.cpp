#include "support.h"

#include <reprise/models/registry.h>
#include <reprise/train/run.h>

#include <torch/nn/modules/linear.h>

namespace reprise {
namespace {

using testing::error_of;

class Points final : public Dataset {
 public:
  int64_t size() const override { return 8; }
  Batch get(const std::vector<int64_t>& indices) const override {
    const auto n = static_cast<int64_t>(indices.size());
    return {.tensors = {torch::ones({n, 3})}, .samples = n, .count = n};
  }
  std::string description() const override { return "points"; }
};

ModelEntry line() {
  ModelEntry entry{
      .name = "registry-test-line",
      .description = "one layer",
      .make =
          [](const ModelOptions& options) {
            const auto layer =
                std::make_shared<torch::nn::LinearImpl>(3, options.width);
            return Model{
                .root = layer,
                .chain =
                    Chain({make_stage("line",
                                      [layer](const torch::Tensor& x) {
                                        return layer->forward(x).pow(2).sum();
                                      },
                                      {layer})})};
          },
      .data = "registry-test-points"};
  entry.defaults.width = 4;
  return entry;
}

/// Registers both once per process.
void register_both() {
  static const bool done = [] {
    register_model(line());
    register_dataset(
        {.name = "registry-test-points", .open = [](const DataOptions&) {
           return std::make_shared<Points>();
         }});
    return true;
  }();
  (void)done;
}

TEST(Registry, MakesModelsByName) {
  register_both();
  const Model model = make_model("registry-test-line");
  EXPECT_EQ(model.name, "registry-test-line");
  EXPECT_EQ(model.options.width, 4);
  EXPECT_EQ(model.task, Task::kOther);
  EXPECT_EQ(parameter_count(model), 16);
  ModelOptions wider;
  wider.width = 5;
  EXPECT_EQ(parameter_count(make_model("registry-test-line", wider)), 20);
  ModelOptions deeper;
  deeper.depth = 2;
  EXPECT_NE(error_of([&] {
              make_model("registry-test-line", deeper);
            }).find("has no option depth; it has width"),
            std::string::npos);
  bool listed = false;
  for (const ModelInfo& info : model_list()) {
    listed |= info.name == "registry-test-line";
  }
  EXPECT_TRUE(listed);
  EXPECT_EQ(model_entry("gpt2").task, Task::kLanguage);
}

TEST(Registry, TrainsModelsByName) {
  register_both();
  TrainConfig config;
  config.model = "registry-test-line";
  config.data = "registry-test-points";
  config.model_options.width = 6;
  config.batch = 4;
  config.steps = 3;
  config.evaluate = false;
  config.device = testing::device().str();
  const TrainSummary summary = run_training(config).training.summary;
  EXPECT_EQ(summary.model, "registry-test-line");
  EXPECT_EQ(summary.steps, 3);
  // The configuration refers to both by their names.
  EXPECT_EQ(config_from_json(to_json(config)).model, "registry-test-line");
}

TEST(Registry, RejectsNamesThatAreTakenOrWrong) {
  register_both();
  const auto model_error = [](const std::string& name) {
    ModelEntry entry = line();
    entry.name = name;
    return error_of([&] { register_model(std::move(entry)); });
  };
  EXPECT_NE(model_error("gpt2").find("there is a model 'gpt2' already"),
            std::string::npos);
  EXPECT_NE(model_error("a b").find("expected a name"), std::string::npos);
  ModelEntry empty = line();
  empty.name = "registry-test-empty";
  empty.make = nullptr;
  EXPECT_NE(error_of([&] {
              register_model(std::move(empty));
            }).find("expected a function that makes"),
            std::string::npos);
  EXPECT_NE(error_of([] {
              register_dataset({.name = "mnist", .open = nullptr});
            }).find("there is a dataset 'mnist' already"),
            std::string::npos);
  EXPECT_NE(error_of([] {
              make_model("registry-test-lime");
            }).find("did you mean registry-test-line?"),
            std::string::npos);
}

}  // namespace
}  // namespace reprise
