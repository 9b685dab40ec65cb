#include "small_models.h"
#include "support.h"

#include <reprise/data/safetensors.h>
#include <reprise/models/model.h>

#include <filesystem>
#include <set>

namespace reprise {
namespace {

using testing::error_of;
using testing::same;
using torch::Tensor;

const ModelOptions& options_of(const std::string& name) {
  for (const auto& small : testing::small_models()) {
    if (small.name == name) return small.options;
  }
  throw std::out_of_range(name);
}

Model make(const std::string& name) {
  return make_model(name, options_of(name));
}

/// A model and a file with all of its tensors, which tests modify and load.
struct WeightFile {
  explicit WeightFile(const std::string& name)
      : model(make(name)),
        path(::testing::TempDir() + "reprise_weights_" + name + "_" +
             ::testing::UnitTest::GetInstance()->current_test_info()->name()) {
    export_weights(model, path);
    const SafeTensors file(path);
    for (const auto& [key, entry] : file.entries()) {
      tensors[key] = file.read(key);
    }
  }
  ~WeightFile() {
    std::error_code ignored;
    std::filesystem::remove(path, ignored);
  }

  void write() const {
    write_safetensors(path, NamedTensors(tensors.begin(), tensors.end()));
  }

  /// Loads the file into a new model.
  Model load() const {
    write();
    Model other = make(model.name);
    load_weights(other, path);
    return other;
  }

  std::string problem() const {
    write();
    Model other = make(model.name);
    const auto before = copy(other);
    const std::string text = error_of([&] { load_weights(other, path); });
    EXPECT_NE(text.find("[weights] " + path), std::string::npos) << text;
    const auto after = copy(other);
    for (size_t i = 0; i < before.size(); ++i) {
      EXPECT_TRUE(same(before[i], after[i])) << "the model was changed";
    }
    return text;
  }

  static std::vector<Tensor> copy(const Model& model) {
    std::vector<Tensor> all;
    for (const auto& tensor : model.root->parameters()) {
      all.push_back(tensor.detach().clone());
    }
    for (const auto& tensor : model.root->buffers()) {
      all.push_back(tensor.detach().clone());
    }
    return all;
  }

  void rename(const std::string& from, const std::string& to) {
    tensors[to] = tensors.at(from);
    tensors.erase(from);
  }

  Model model;
  std::string path;
  std::map<std::string, Tensor> tensors;
};

void expect_equal(const Model& a, const Model& b) {
  const auto x = WeightFile::copy(a);
  const auto y = WeightFile::copy(b);
  ASSERT_EQ(x.size(), y.size());
  for (size_t i = 0; i < x.size(); ++i) {
    EXPECT_TRUE(same(x[i], y[i])) << a.name << " " << i;
  }
}

void expect_in(const std::string& part, const std::string& text) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(Weights, RoundTripOfAllModels) {
  for (const auto& small : testing::small_models()) {
    WeightFile file(small.name);
    expect_equal(file.load(), file.model);
    EXPECT_EQ(file.tensors.size(), file.model.root->parameters().size() +
                                       file.model.root->buffers().size());
  }
}

TEST(Weights, NamesAndShapesMatchOriginals) {
  const WeightFile gpt2("gpt2");  // width 16
  EXPECT_EQ(gpt2.tensors.size(), 2u + 2 * 12 + 2);
  EXPECT_EQ(gpt2.tensors.at("transformer.h.1.attn.c_attn.weight").sizes(),
            (std::vector<int64_t>{16, 48}));
  EXPECT_EQ(gpt2.tensors.at("transformer.h.0.mlp.c_proj.weight").sizes(),
            (std::vector<int64_t>{64, 16}));
  EXPECT_TRUE(gpt2.tensors.contains("transformer.ln_f.bias"));
  EXPECT_EQ(SafeTensors(gpt2.path).metadata().at("format"), "pt");

  const WeightFile bert("bert-base");
  EXPECT_EQ(bert.tensors.size(), 5u + 2 * 16 + 4);
  for (const char* name :
       {"bert.embeddings.word_embeddings.weight",
        "bert.embeddings.position_embeddings.weight",
        "bert.embeddings.token_type_embeddings.weight",
        "bert.embeddings.LayerNorm.bias",
        "bert.encoder.layer.0.attention.self.query.weight",
        "bert.encoder.layer.0.attention.output.dense.bias",
        "bert.encoder.layer.0.attention.output.LayerNorm.weight",
        "bert.encoder.layer.1.intermediate.dense.weight",
        "bert.encoder.layer.1.output.LayerNorm.bias", "bert.pooler.dense.bias",
        "classifier.weight"}) {
    EXPECT_TRUE(bert.tensors.contains(name)) << name;
  }

  const WeightFile vit("vit-b-16");
  EXPECT_EQ(vit.tensors.size(), 4u + 2 * 16 + 4);
  for (const char* name :
       {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings",
        "vit.embeddings.patch_embeddings.projection.weight",
        "vit.encoder.layer.0.attention.attention.query.weight",
        "vit.encoder.layer.0.attention.output.dense.weight",
        "vit.encoder.layer.0.intermediate.dense.weight",
        "vit.encoder.layer.0.output.dense.weight",
        "vit.encoder.layer.0.layernorm_before.weight",
        "vit.encoder.layer.1.layernorm_after.bias", "vit.layernorm.weight",
        "classifier.bias"}) {
    EXPECT_TRUE(vit.tensors.contains(name)) << name;
  }

  const WeightFile resnet("resnet50");
  EXPECT_EQ(resnet.tensors.size(), 320u);  // as torchvision's state_dict()
  for (const char* name :
       {"conv1.weight", "bn1.running_var", "bn1.num_batches_tracked",
        "layer1.0.downsample.1.running_mean", "layer4.2.conv3.weight",
        "fc.bias"}) {
    EXPECT_TRUE(resnet.tensors.contains(name)) << name;
  }

  const WeightFile vgg("vgg16");
  std::set<std::string> names;
  for (const auto& [name, tensor] : vgg.tensors) names.insert(name);
  std::set<std::string> expected;
  for (const int layer : {0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28}) {
    expected.insert("features." + std::to_string(layer) + ".weight");
    expected.insert("features." + std::to_string(layer) + ".bias");
  }
  for (const int layer : {0, 3, 6}) {
    expected.insert("classifier." + std::to_string(layer) + ".weight");
    expected.insert("classifier." + std::to_string(layer) + ".bias");
  }
  EXPECT_EQ(names, expected);
}

TEST(Weights, ConvertsTypes) {
  WeightFile file("gpt2");
  for (auto& [name, tensor] : file.tensors) {
    tensor = tensor.to(torch::kBFloat16);
  }
  const Model loaded = file.load();
  for (const auto& item : loaded.root->named_parameters()) {
    EXPECT_TRUE(
        same(item.value(), file.tensors.at(item.key()).to(torch::kFloat)));
  }
}

TEST(Weights, AcceptsMissingPrefix) {
  for (const auto& [name, prefix] :
       {std::pair("gpt2", "transformer."), std::pair("bert-base", "bert."),
        std::pair("vit-b-16", "vit.")}) {
    WeightFile file(name);
    const std::string body = prefix;
    for (const auto& [key, tensor] : std::map(file.tensors)) {
      if (key.starts_with(body)) file.rename(key, key.substr(body.size()));
    }
    expect_equal(file.load(), file.model);
  }
  WeightFile wrapped("resnet18");
  for (const auto& [key, tensor] : std::map(wrapped.tensors)) {
    wrapped.rename(key, "module." + key);
  }
  expect_equal(wrapped.load(), wrapped.model);
}

TEST(Weights, AcceptsTiedWeightsUnderEitherName) {
  WeightFile file("gpt2");
  const Tensor wte = file.tensors.at("transformer.wte.weight");
  file.tensors["lm_head.weight"] = wte.clone();
  expect_equal(file.load(), file.model);
  file.tensors.erase("transformer.wte.weight");
  expect_equal(file.load(), file.model);
  file.tensors["transformer.wte.weight"] = wte + 1;
  expect_in("are tied in gpt2, but differ", file.problem());
}

TEST(Weights, AcceptsConstantsOldNamesAndOtherHeads) {
  WeightFile gpt2("gpt2");
  gpt2.tensors["h.0.attn.bias"] = torch::ones({1, 1, 8, 8});
  gpt2.tensors["transformer.h.1.attn.masked_bias"] = torch::tensor(-1e4);
  expect_equal(gpt2.load(), gpt2.model);

  WeightFile bert("bert-base");
  bert.tensors["bert.embeddings.position_ids"] = torch::arange(8).view({1, 8});
  bert.tensors["cls.predictions.bias"] = torch::ones({11});
  bert.rename("bert.embeddings.LayerNorm.weight",
              "bert.embeddings.LayerNorm.gamma");
  bert.rename("bert.embeddings.LayerNorm.bias",
              "bert.embeddings.LayerNorm.beta");
  expect_equal(bert.load(), bert.model);

  WeightFile resnet("resnet18");
  resnet.tensors.erase("bn1.num_batches_tracked");
  expect_equal(resnet.load(), resnet.model);
}

TEST(Weights, MissingHeadIsNotLoaded) {
  WeightFile file("bert-base");
  file.tensors.erase("classifier.weight");
  expect_in("expected tensor 'classifier.weight', which", file.problem());
  file.tensors.erase("classifier.bias");
  const Model loaded = file.load();
  const auto parameters = loaded.root->named_parameters();
  EXPECT_TRUE(same(parameters["bert.pooler.dense.weight"],
                   file.tensors.at("bert.pooler.dense.weight")));
  EXPECT_FALSE(same(parameters["classifier.weight"],
                    file.model.root->named_parameters()["classifier.weight"]));
}

TEST(Weights, RejectsMismatchedTensors) {
  WeightFile shape("gpt2");
  shape.tensors["transformer.wte.weight"] = torch::zeros({11, 12});
  expect_in(
      "tensor 'transformer.wte.weight' has shape [11, 12], expected [11, 16]",
      shape.problem());

  WeightFile missing("resnet18");
  missing.tensors.erase("layer1.0.bn1.running_mean");
  expect_in(
      "expected tensor 'layer1.0.bn1.running_mean', which the file does not "
      "have",
      missing.problem());

  WeightFile extra("gpt2");
  extra.tensors["transformer.h.2.ln_1.weight"] = torch::zeros({16});
  expect_in("gpt2 has no tensor 'transformer.h.2.ln_1.weight'",
            extra.problem());
  for (int i = 3; i < 9; ++i) {
    extra.tensors["h." + std::to_string(i) + ".ln_1.weight"] =
        torch::zeros({16});
  }
  expect_in("and 4 more", extra.problem());
}

}  // namespace
}  // namespace reprise
