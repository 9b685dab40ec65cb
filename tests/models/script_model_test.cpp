#include "models/script_directory.h"

#include <reprise/data/safetensors.h>
#include <reprise/models/script.h>
#include <reprise/recompute/strategy.h>

#include <nlohmann/json.hpp>

#include <cstdlib>
#include <filesystem>
#include <set>

namespace reprise {
namespace {

using nlohmann::json;
using testing::error_of;
using testing::same;
using testing::ScriptDirectory;
using testing::Twins;
using torch::Tensor;

void expect_text(const std::string& part, const std::string& text) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(ScriptModel, HasTheNamesAndWeightsOfThePythonModel) {
  Twins twins(2);
  ScriptDirectory directory(twins);
  // The values of the scripts' own files do not count.
  for (auto& [name, tensor] : directory.weights) tensor = tensor.clone();
  directory.weights.at("head.fc.bias").detach().fill_(3);
  directory.write();
  const Model model = directory.load();
  EXPECT_EQ(model.name, "twin");
  EXPECT_EQ(model.chain.size(), 4);
  EXPECT_EQ(model.chain[1].name(), "layers.1");
  std::set<std::string> names;
  for (const auto& item : model.root->named_parameters()) {
    names.insert(item.key());
  }
  std::set<std::string> expected;
  for (const auto& item : twins.root->named_parameters()) {
    expected.insert(item.key());
  }
  EXPECT_EQ(names, expected);
  EXPECT_EQ(model.root->named_buffers().size(),
            twins.root->named_buffers().size());
  EXPECT_EQ(model.chain.parameters().size(), expected.size());
  const auto parameters = model.root->named_parameters();
  EXPECT_TRUE(same(parameters["head.fc.bias"], torch::full({5}, 3.0)));
  EXPECT_TRUE(parameters["head.fc.bias"].requires_grad());

  export_weights(model, directory.folder / "exported.safetensors");
  EXPECT_EQ(
      SafeTensors(directory.folder / "exported.safetensors").entries().size(),
      directory.weights.size());
  load_script_model(directory.folder.path());
  Model other = directory.load();
  load_weights(other, directory.folder / "exported.safetensors");
}

TEST(ScriptModel, CountsCorrectPredictionsInEvaluation) {
  Twins twins(2);
  const ScriptDirectory directory(twins);
  const Model model = directory.load();
  const Tensors batch = testing::twin_inputs();
  const Schedule none = make_schedule("none", model.chain.size());
  model.root->eval();
  twins.root->eval();
  const torch::NoGradGuard no_grad;
  const Tensors outputs = model.chain.forward(batch, none);
  const Tensors expected = twins.native.forward(batch, none);
  ASSERT_EQ(outputs.size(), 2u);
  EXPECT_TRUE(same(outputs[0], expected[0]));
  EXPECT_EQ(outputs[1].scalar_type(), torch::kDouble);
  EXPECT_TRUE(same(outputs[1], expected[1]));
  model.root->train();
  EXPECT_EQ(model.chain.forward(batch, none).size(), 1u);
}

TEST(ScriptModel, PassesTensorsOnAndCountsNothingWithoutACount) {
  Twins twins(1);
  ScriptDirectory directory(twins);
  directory.model["stages"] = json::array();
  directory.weights.clear();
  directory.add("split", testing::script_of(R"(
def forward(self, x: Tensor):
    return x * 2, x + 1
)"),
                1);
  directory.model["stages"][0]["outputs"] = 2;
  directory.add("join", testing::script_of(R"(
def forward(self, a: Tensor, b: Tensor):
    return torch.sum(a * b, [1])
)"),
                2);
  directory.add("loss", testing::script_of(R"(
def forward(self, x: Tensor, targets: Tensor):
    return torch.sum((x - targets) ** 2)
)"),
                2);
  directory.write();
  const Model model = directory.load();
  const Tensor x = torch::randn({3, 2}), targets = torch::randn({3});
  const Schedule none = make_schedule("none", 3);
  const Tensor expected = ((x * 2 * (x + 1)).sum(1) - targets).pow(2).sum();
  EXPECT_TRUE(same(model.chain.forward({x, targets}, none).at(0), expected));
  model.root->eval();
  EXPECT_EQ(model.chain.forward({x, targets}, none).at(1).item<double>(), 0);
}

TEST(ScriptModel, SharesTiedTensorsBetweenStages) {
  Twins twins(2);
  ScriptDirectory directory(twins);
  // The second block uses the convolution of the first one.
  for (const char* name : {"conv.weight", "conv.bias"}) {
    directory.model["stages"][1]["tensors"][name] =
        std::string("layers.0.") + name;
    directory.weights.erase(std::string("layers.1.") + name);
  }
  directory.write();
  Model model = directory.load();
  EXPECT_EQ(model.root->parameters().size(),
            twins.root->parameters().size() - 2);
  EXPECT_EQ(model.chain.parameters().size(), model.root->parameters().size());
  model.root->to(torch::kDouble);
  const Tensor weight = model.root->named_parameters()["layers.0.conv.weight"];
  Tensors batch = testing::twin_inputs();
  batch[0] = batch[0].to(torch::kDouble);
  std::vector<Tensor> results;
  for (const char* strategy : {"none", "all"}) {
    torch::manual_seed(4);
    model.chain.forward(batch, make_schedule(strategy, 4))[0].backward();
    results.push_back(weight.grad().clone());
    weight.mutable_grad().reset();
  }
  EXPECT_TRUE(same(results[0], results[1]));
  // The same network in C++, with one convolution for both blocks.
  twins.root->to(torch::kDouble);
  auto& first = dynamic_cast<testing::NativeBlockImpl&>(*twins.natives[0]);
  auto& second = dynamic_cast<testing::NativeBlockImpl&>(*twins.natives[1]);
  second.conv->weight = first.conv->weight;
  second.conv->bias = first.conv->bias;
  torch::manual_seed(4);
  Tensors outputs = batch;
  for (int i = 0; i < twins.native.size(); ++i) {
    outputs = twins.native[i](outputs);
  }
  outputs[0].backward();
  EXPECT_TRUE(torch::allclose(results[0], first.conv->weight.grad()));
}

TEST(ScriptModel, KeyDependsOnTheCodeAndNotOnTheWeights) {
  torch::manual_seed(1);
  const std::string key = ScriptDirectory(Twins(2)).load().cost_key;
  EXPECT_FALSE(key.empty());
  EXPECT_EQ(ScriptDirectory(Twins(2)).load().cost_key, key);
  EXPECT_NE(ScriptDirectory(Twins(3)).load().cost_key, key);
  Twins frozen(2);
  for (const auto& tensor : frozen.scripts[0].parameters()) {
    tensor.set_requires_grad(false);
  }
  EXPECT_NE(ScriptDirectory(frozen).load().cost_key, key);
  // Equal blocks are measured once.
  const Model model = ScriptDirectory(Twins(2)).load();
  EXPECT_EQ(model.chain[0].kind(), model.chain[1].kind());
  EXPECT_NE(model.chain[0].kind(), model.chain[2].kind());
}

TEST(ScriptModel, RejectsWrongModelFiles) {
  const Twins twins(2);
  ScriptDirectory version(twins);
  version.model["version"] = 2;
  expect_text("model.json: expected version 1, got 2", version.problem());

  ScriptDirectory lacks(twins);
  lacks.model.erase("stages");
  expect_text("expected a file written by split_model.py", lacks.problem());

  ScriptDirectory none(twins);
  std::filesystem::remove(none.folder / "model.json");
  expect_text("model.json", error_of([&] { none.load(); }));
  none.write();
  std::filesystem::remove(none.folder / "layers.1.pt");
  expect_text("there is no file " + none.folder / "layers.1.pt",
              error_of([&] { none.load(); }));

  ScriptDirectory many(twins);
  many.model["stages"][0]["inputs"] = 2;
  many.model["stages"][0]["outputs"] = 2;
  expect_text(
      "stage 'layers.0' takes 2 tensors, but forward() in layers.0.pt "
      "takes 1",
      many.problem());

  ScriptDirectory loss(twins);
  loss.model["inputs"] = 2;
  expect_text("1 are left behind 'loss'", loss.problem());
  loss.model["stages"][2]["inputs"] = 7;
  expect_text("stage 'head' takes 7 tensors, expected 1 to 3", loss.problem());

  ScriptDirectory outputs(twins);
  outputs.model["stages"][0]["outputs"] = 2;
  outputs.model["stages"][1]["inputs"] = 2;
  expect_text("takes 2 tensors, but forward()", outputs.problem());
}

TEST(ScriptModel, RejectsWrongWeights) {
  const Twins twins(2);
  ScriptDirectory missing(twins);
  missing.weights.erase("layers.1.bn.running_mean");
  expect_text("expected tensor 'layers.1.bn.running_mean' of stage 'layers.1'",
              missing.problem());

  ScriptDirectory extra(twins);
  extra.weights["layers.2.bn.weight"] = torch::ones(4);
  expect_text("no stage of twin has tensor 'layers.2.bn.weight'",
              extra.problem());

  ScriptDirectory shape(twins);
  shape.weights["head.fc.bias"] = torch::ones(6);
  expect_text("tensor 'head.fc.bias' has shape [6], expected [5] as in head.pt",
              shape.problem());

  ScriptDirectory type(twins);
  type.weights["head.fc.bias"] = torch::ones(5, torch::kDouble);
  expect_text(
      "tensor 'head.fc.bias' has type Double, expected Float as in "
      "head.pt",
      type.problem());

  ScriptDirectory dtype(twins);
  dtype.model["dtype"] = "float64";
  expect_text("expected parameters of type float64, got float32",
              dtype.problem());

  ScriptDirectory unnamed(twins);
  unnamed.model["stages"][0]["tensors"].erase("bn.weight");
  expect_text("expected a name for tensor 'bn.weight' of stage 'layers.0'",
              unnamed.problem());
}

TEST(ScriptModel, RejectsWrongResultsOfStages) {
  const Twins twins(1);
  ScriptDirectory two(twins);
  two.model["stages"] = json::array();
  two.weights.clear();
  two.add("pair", testing::script_of(R"(
def forward(self, x: Tensor):
    return x, x
)"),
          1);
  two.add("loss", testing::script_of(R"(
def forward(self, x: Tensor, targets: Tensor):
    return (x - targets) ** 2
)"),
          2);
  two.write();
  const Model pair = two.load();
  const Tensors batch = {torch::ones(3), torch::ones(3)};
  expect_text(
      "[stage 'pair'] expected that its script returns 1 tensors, as "
      "model.json states, got 2",
      error_of([&] { pair.chain[0](batch); }));
  expect_text(
      "[script 'loss'] expected the sum of the losses, a single number, "
      "got 3 numbers",
      error_of([&] { pair.chain[1](batch); }));
}

/// Compares with what PyTorch computed in Python; run by split_model_test.py.
TEST(ScriptModel, GradientsEqualThoseOfPython) {
  const char* path = std::getenv("REPRISE_SPLIT_MODEL");
  if (path == nullptr) {
    GTEST_SKIP() << "runs as part of models/split_model, with torch for Python";
  }
  const std::string folder = path;
  const SafeTensors expected(folder + "/expected.safetensors");
  Tensors batch;
  for (int i = 0; expected.entries().contains("input." + std::to_string(i));
       ++i) {
    batch.push_back(expected.read("input." + std::to_string(i)));
  }
  const auto compare = [&](const std::string& name, const Tensor& actual) {
    ASSERT_TRUE(expected.entries().contains(name)) << name;
    const Tensor value = expected.read(name);
    EXPECT_LT(testing::relative_error(value, actual), 1e-5) << name;
    // Debian's Python uses the LibTorch that this test is linked with.
    if (std::getenv("REPRISE_SAME_LIBTORCH") != nullptr) {
      EXPECT_TRUE(torch::equal(value, actual)) << name;
    }
  };
  for (const char* strategy : {"none", "all", "sqrt"}) {
    const Model model = load_script_model(folder);
    torch::manual_seed(5);
    const Tensor loss =
        model.chain.forward(batch, make_schedule(strategy, model.chain.size()))
            .at(0);
    loss.backward();
    compare("loss", loss.detach());
    size_t compared = 1 + batch.size();
    for (const auto& item : model.root->named_parameters()) {
      if (!item.value().requires_grad()) continue;
      compare("grad." + item.key(), item.value().grad());
      ++compared;
    }
    for (const auto& item : model.root->named_buffers()) {
      if (!item.value().is_floating_point()) continue;
      compare("buffer." + item.key(), item.value());
      ++compared;
    }
    EXPECT_EQ(compared, expected.entries().size()) << strategy;
  }
}

}  // namespace
}  // namespace reprise
