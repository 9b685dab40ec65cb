#include "support.h"

#include <reprise/models/registry.h>
#include <reprise/train/fields.h>
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

/// Registers a model with options of its own once per process. Its layer has `inputs`
/// inputs, and a bias if `bias` is set.
void register_optional() {
  static const bool done = [] {
    ModelEntry entry = line();
    entry.name = "registry-test-options";
    entry.make = [](const ModelOptions& options) {
      const auto layer = std::make_shared<torch::nn::LinearImpl>(
          torch::nn::LinearOptions(options.get<int64_t>("registry-inputs"),
                                   options.width)
              .bias(options.get<bool>("registry-bias")));
      return Model{.root = layer,
                   .chain = Chain({make_stage("line", layer)}),
                   .cost_key = "line"};
    };
    entry.own_options = {
        {.name = "registry-inputs",
         .help = "Number of inputs",
         .value = 3,
         .lowest = 1,
         .highest = 9},
        {.name = "registry-bias", .help = "Bias of the layer", .value = false},
        {.name = "registry-scale",
         .help = "Scale of the weights",
         .value = 0.5,
         .lowest = 0},
        {.name = "registry-kind",
         .help = "Kind of the layer",
         .value = "dense",
         .choices = {"dense", "sparse"}}};
    register_model(std::move(entry));
    return true;
  }();
  (void)done;
}

TEST(Registry, OptionsOfItsOwnReachTheModel) {
  config_fields();  // a model that is registered later has its fields too
  register_optional();
  Model model = make_model("registry-test-options");
  EXPECT_EQ(parameter_count(model), 12);
  EXPECT_EQ(model.options.get<double>("registry-scale"), 0.5);
  EXPECT_EQ(model.options.get<std::string>("registry-kind"), "dense");
  const std::string key = model.cost_key;
  ModelOptions options;
  options.own = {{"registry-inputs", int64_t{5}}, {"registry-bias", true}};
  model = make_model("registry-test-options", options);
  EXPECT_EQ(parameter_count(model), 5 * 4 + 4);
  EXPECT_NE(model.cost_key, key);
  EXPECT_THROW(model.options.get<double>("registry-inputs"), c10::Error);
  EXPECT_THROW(model.options.get<bool>("registry-nothing"), c10::Error);
}

TEST(Registry, OptionsOfItsOwnAreFields) {
  register_optional();
  TrainConfig config;
  config.model = "registry-test-options";
  config.data = "random";
  for (const auto& [name, text] :
       std::map<std::string, std::string>{{"registry-inputs", "5"},
                                          {"registry-bias", "true"},
                                          {"registry-scale", "0.25"},
                                          {"registry-kind", "sparse"}}) {
    const auto* field = config_fields().find(name);
    ASSERT_NE(field, nullptr) << name;
    TrainConfig changed = config;
    EXPECT_FALSE(field->given(changed)) << name;
    field->set(changed, text);
    EXPECT_EQ(field->get(changed), text);
    const TrainConfig back = config_from_json(to_json(changed));
    EXPECT_EQ(field->get(back), text) << to_json(changed);
    EXPECT_NE(conflict(config, changed), "") << name;
    EXPECT_NE(config_fields().cost_key(config),
              config_fields().cost_key(changed));
    EXPECT_EQ(field->group, "Options of registry-test-options");
    EXPECT_TRUE(field->in_studies);
  }
  EXPECT_EQ(to_json(config).find("registry-inputs"), std::string::npos);
  config.resolve();
  EXPECT_NE(to_json(config).find("\"registry-inputs\": 3"), std::string::npos);
  const TrainConfig mlp = [] {
    TrainConfig other;
    other.model = "mlp";
    other.resolve();
    return other;
  }();
  EXPECT_EQ(to_json(mlp).find("registry-inputs"), std::string::npos);
}

TEST(Registry, RejectsWrongValuesOfOwnOptions) {
  register_optional();
  const auto error = [](const std::string& name, const OptionValue& value) {
    ModelOptions options;
    options.own[name] = value;
    return error_of([&] { resolve_options("registry-test-options", options); });
  };
  ModelOptions most;
  most.own["registry-inputs"] = int64_t{9};
  EXPECT_NO_THROW(resolve_options("registry-test-options", most));
  EXPECT_NE(error("registry-inputs", int64_t{10}).find("from 1 to 9"),
            std::string::npos);
  EXPECT_NE(error("registry-inputs", 2.0).find("expected a whole number"),
            std::string::npos);
  EXPECT_NE(error("registry-scale", -1.0).find("of at least 0"),
            std::string::npos);
  EXPECT_NE(error("registry-kind", "spars").find("did you mean sparse?"),
            std::string::npos);
  EXPECT_NE(
      error("registry-input", int64_t{2}).find("did you mean registry-inputs?"),
      std::string::npos);
  TrainConfig config;
  config.model = "mlp";
  config.model_options.own["registry-inputs"] = int64_t{2};
  EXPECT_NE(
      error_of([&] { config.resolve(); }).find("has no option registry-inputs"),
      std::string::npos);
}

TEST(Registry, RejectsWrongOwnOptions) {
  register_optional();
  const auto error = [](OwnOption option) {
    ModelEntry entry = line();
    entry.name = "registry-test-wrong";
    entry.own_options = {std::move(option)};
    return error_of([&] { register_model(std::move(entry)); });
  };
  EXPECT_NE(error({.name = "A", .help = "", .value = 1}).find("lower-case"),
            std::string::npos);
  EXPECT_NE(error({.name = "width", .help = "", .value = 1})
                .find("a member of ModelOptions"),
            std::string::npos);
  EXPECT_NE(error({.name = "registry-bias", .help = "", .value = 1})
                .find("it is true or false; choose another name"),
            std::string::npos);
  EXPECT_NE(error({.name = "new", .help = "", .value = 1, .lowest = 2})
                .find("default of option 'new'"),
            std::string::npos);
}

}  // namespace
}  // namespace reprise
