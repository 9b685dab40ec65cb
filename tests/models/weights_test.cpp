#include "small_models.h"
#include "support.h"
#include "temporary.h"

#include <reprise/base/error.h>
#include <reprise/data/safetensors.h>
#include <reprise/memory/meter.h>
#include <reprise/models/model.h>

#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>
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

  const WeightFile llama("llama-3.2-1b");  // width 24, 2 of 6 heads, tied
  EXPECT_EQ(llama.tensors.size(), 1u + 2 * 9 + 1);
  for (const char* name :
       {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "model.norm.weight"}) {
    EXPECT_TRUE(llama.tensors.contains(name)) << name;
  }
  EXPECT_EQ(llama.tensors.at("model.layers.0.self_attn.k_proj.weight").sizes(),
            (std::vector<int64_t>{8, 24}));
  EXPECT_EQ(llama.tensors.at("model.layers.0.mlp.down_proj.weight").sizes(),
            (std::vector<int64_t>{24, 13}));

  const WeightFile qwen("qwen2.5-7b");  // with biases and a separate head
  EXPECT_EQ(qwen.tensors.size(), 1u + 2 * 12 + 2);
  for (const char* name :
       {"model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.k_proj.bias",
        "model.layers.1.self_attn.v_proj.bias", "lm_head.weight"}) {
    EXPECT_TRUE(qwen.tensors.contains(name)) << name;
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
        std::pair("llama-small", "model."), std::pair("qwen2.5-7b", "model."),
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
  for (const std::string model : {"gpt2", "llama-3.2-1b", "qwen2.5-0.5b"}) {
    const std::string name = model == "gpt2" ? "transformer.wte.weight"
                                             : "model.embed_tokens.weight";
    WeightFile file(model);
    const Tensor table = file.tensors.at(name);
    file.tensors["lm_head.weight"] = table.clone();
    expect_equal(file.load(), file.model);
    file.tensors.erase(name);
    expect_equal(file.load(), file.model);
    file.tensors[name] = table + 1;
    expect_in("are tied in " + model + ", but differ", file.problem());
  }
  WeightFile separate("llama-3-8b");
  separate.tensors["lm_head.weight"].add_(1);
  const Model loaded = separate.load();
  EXPECT_TRUE(same(loaded.root->named_parameters()["lm_head.weight"],
                   separate.tensors.at("lm_head.weight")));
  separate.tensors.erase("lm_head.weight");
  expect_in("expected tensor 'lm_head.weight', which", separate.problem());
}

TEST(Weights, AcceptsConstantsOldNamesAndOtherHeads) {
  WeightFile gpt2("gpt2");
  gpt2.tensors["h.0.attn.bias"] = torch::ones({1, 1, 8, 8});
  gpt2.tensors["transformer.h.1.attn.masked_bias"] = torch::tensor(-1e4);
  expect_equal(gpt2.load(), gpt2.model);

  WeightFile llama("llama-small");
  llama.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] =
      torch::ones({2});
  expect_equal(llama.load(), llama.model);

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

/// A model and a checkpoint of it in several files, in bfloat16.
struct Shards {
  Shards() : model(make("qwen2.5-7b")) {
    NamedTensors shards[2];
    size_t next = 0;
    for (const auto& item : model.root->named_parameters()) {
      const torch::NoGradGuard no_grad;
      const Tensor rounded = item.value().to(torch::kBFloat16);
      Tensor(item.value()).copy_(rounded);
      shards[next].emplace_back(item.key(), rounded);
      weight_map[item.key()] = kNames[next];
      next = 1 - next;
    }
    for (size_t i = 0; i < 2; ++i) {
      write_safetensors(folder / kNames[i], shards[i]);
    }
    write_index();
  }

  void write_index() const {
    nlohmann::json index;
    index["metadata"] = {{"total_size", 1}};
    index["weight_map"] = weight_map;
    std::ofstream(this->index) << index.dump();
  }

  Model load(const std::string& path) const {
    Model other = make(model.name);
    load_weights(other, path);
    return other;
  }
  std::string problem() const {
    Model other = make(model.name);
    const auto before = WeightFile::copy(other);
    const std::string text = error_of([&] { load_weights(other, index); });
    const auto after = WeightFile::copy(other);
    for (size_t i = 0; i < before.size(); ++i) {
      EXPECT_TRUE(same(before[i], after[i])) << "the model was changed";
    }
    return text;
  }

  static constexpr const char* kNames[2] = {"model-00001-of-00002.safetensors",
                                            "model-00002-of-00002.safetensors"};
  Model model;
  testing::TemporaryDirectory folder;
  std::string index = folder / "model.safetensors.index.json";
  std::map<std::string, std::string> weight_map;
};

TEST(Weights, WritesCheckpointsInSeveralFiles) {
  const Shards shards;
  const testing::TemporaryDirectory folder;
  const std::string index = folder / "model.safetensors.index.json";
  int64_t bytes = 0, largest = 0;
  for (const Tensor& p : shards.model.root->parameters()) {
    bytes += static_cast<int64_t>(p.nbytes());
    largest = std::max(largest, static_cast<int64_t>(p.nbytes()));
  }
  for (const int64_t most : {int64_t{1}, largest, bytes / 3, 2 * bytes}) {
    export_weights(shards.model, index, most);
    expect_equal(shards.load(index), shards.model);
    const auto written = nlohmann::json::parse(read_text(index));
    EXPECT_EQ(written["metadata"]["total_size"], bytes);
    std::set<std::string> files;
    for (const auto& [name, file] : written["weight_map"].items()) {
      files.insert(file.get<std::string>());
    }
    for (const std::string& file : files) {
      const SafeTensors part(folder / file);
      EXPECT_EQ(part.metadata().at("format"), "pt");
      int64_t in_part = 0;
      for (const auto& [name, entry] : part.entries()) {
        in_part += static_cast<int64_t>(entry.end - entry.begin);
      }
      EXPECT_TRUE(in_part <= most || part.entries().size() == 1) << file;
    }
    if (most > bytes) {
      EXPECT_EQ(files,
                std::set<std::string>{"model-00001-of-00001.safetensors"});
    }
  }
}

// An index must not name files of two checkpoints.
TEST(Weights, LeavesNoIndexOfAnInterruptedCheckpoint) {
  const Shards shards;
  const testing::TemporaryDirectory folder;
  const std::string index = folder / "model.safetensors.index.json";
  export_weights(shards.model, index);
  std::filesystem::remove(folder / "model-00001-of-00001.safetensors");
  std::filesystem::create_directory(folder /
                                    "model-00001-of-00001.safetensors");
  EXPECT_THROW(export_weights(shards.model, index), Error);
  EXPECT_FALSE(std::filesystem::exists(index));
}

TEST(Weights, LoadsCheckpointsInSeveralFiles) {
  const Shards shards;
  expect_equal(shards.load(shards.index), shards.model);
  expect_equal(shards.load(shards.folder / "."), shards.model);
  for (const Tensor& loaded : shards.load(shards.index).root->parameters()) {
    EXPECT_EQ(loaded.scalar_type(), torch::kFloat);
  }
  // A directory with one file.
  const testing::TemporaryDirectory single;
  export_weights(shards.model, single / "model.safetensors");
  expect_equal(shards.load(single / "."), shards.model);
  // Tensors that the index does not list are not part of the checkpoint.
  Shards extra;
  write_safetensors(extra.folder / "other.safetensors",
                    {{"model.norm.weight", torch::ones({24})},
                     {"unknown", torch::ones({3})}});
  extra.weight_map["model.norm.weight"] = "other.safetensors";
  extra.write_index();
  const auto parameters = extra.load(extra.index).root->named_parameters();
  EXPECT_TRUE(
      same(parameters["model.norm.weight"].detach(), torch::ones({24})));
}

TEST(Weights, HoldsOneTensorOfSeveralFilesAtATime) {
  const Shards shards;
  Model other = make(shards.model.name);
  load_weights(other, shards.index);
  int64_t largest = 0, all = 0;
  for (const Tensor& parameter : other.root->parameters()) {
    largest = std::max<int64_t>(largest, 2 * parameter.numel());
    all += 2 * parameter.numel();
  }
  MemoryMeter meter(torch::kCPU);
  load_weights(other, shards.index);
  EXPECT_LE(meter.peak_increase_bytes(), largest + 1024);
  EXPECT_LT(largest + 1024, all / 2);
}

TEST(Weights, RejectsIncompleteCheckpoints) {
  {
    Shards shards;
    std::filesystem::remove(shards.folder / Shards::kNames[1]);
    expect_in(
        "model.safetensors.index.json: expected the file "
        "'model-00002-of-00002.safetensors' next to it, which is missing",
        shards.problem());
  }
  {
    Shards shards;
    const std::string file = shards.weight_map.at("model.norm.weight");
    shards.weight_map.erase("model.norm.weight");
    shards.write_index();
    expect_in("expected tensor 'model.norm.weight', which", shards.problem());
    shards.weight_map["model.norm.weight"] =
        Shards::kNames[file == Shards::kNames[0] ? 1 : 0];
    shards.write_index();
    expect_in("expected tensor 'model.norm.weight' in 'model-0000",
              shards.problem());
    write_safetensors(shards.folder / "other.safetensors",
                      {{"model.norm.weight", torch::ones({23})}});
    shards.weight_map["model.norm.weight"] = "other.safetensors";
    shards.write_index();
    expect_in("tensor 'model.norm.weight' has shape [23], expected [24]",
              shards.problem());
    shards.weight_map["model.norm.weight"] = "../other.safetensors";
    shards.write_index();
    expect_in(
        "expected the name of a file next to it for tensor "
        "'model.norm.weight', got \"../other.safetensors\"",
        shards.problem());
    std::ofstream(shards.index) << "{\"weight_map\": ";
    expect_in("expected a JSON object with weight_map", shards.problem());
    std::ofstream(shards.index) << "{\"weight_map\": {}}";
    expect_in("expected a JSON object with weight_map", shards.problem());
  }
  const testing::TemporaryDirectory empty;
  Model model = make("llama-small");
  expect_in(
      "expected model.safetensors or model.safetensors.index.json in "
      "this directory",
      error_of([&] { load_weights(model, empty / "."); }));
}

}  // namespace
}  // namespace reprise
