#include "compare_values.h"
#include "support.h"

#include <reprise/models/model.h>

namespace reprise {
namespace {

/// Compares a small version of a model with the weights, loss and gradients of the original,
/// written by tests/fixtures/make_model_values.py.
void expect_values(const std::string& name, const ModelOptions& options,
                   std::vector<torch::ScalarType> types,
                   double loss_tolerance = 1e-5) {
  const std::string path = REPRISE_FIXTURES "/models/" + name;
  for (const auto type : types) {
    Model model = make_model(name, options);
    load_weights(model, path + ".weights.safetensors");
    for (const char* strategy : {"none", "sqrt", "all"}) {
      const auto report =
          testing::compare_values(model, path + ".double.safetensors", strategy,
                                  testing::on_device(type));
      EXPECT_LE(report.loss_difference, loss_tolerance)
          << type << ", " << strategy << ": " << report.to_string();
      EXPECT_LE(report.largest(), 1e-4)
          << type << ", " << strategy << ": " << report.to_string();
    }
  }
}

ModelOptions small_transformer() {
  ModelOptions options;
  options.depth = 2;
  options.width = 32;
  options.heads = 2;
  options.dropout = 0;
  return options;
}

TEST(Values, Gpt2) {
  ModelOptions options = small_transformer();
  options.vocab = 64;
  options.seq = 16;
  expect_values("gpt2", options, {torch::kDouble, torch::kFloat});
}

TEST(Values, Llama) {
  ModelOptions options;
  options.depth = 2;
  options.width = 24;
  options.heads = 4;
  options.kv_heads = 2;
  options.mlp_width = 21;
  options.vocab = 13;
  options.seq = 19;
  // Scaled frequencies; a separate head; biases; biases and a separate head.
  for (const char* name : {"llama-small", "llama-3.2-1b", "llama-3-8b",
                           "qwen2.5-0.5b", "qwen2.5-7b"}) {
    expect_values(name, options, {torch::kDouble, torch::kFloat}, 1e-6);
  }
}

TEST(Values, Bert) {
  ModelOptions options = small_transformer();
  options.vocab = 64;
  options.seq = 16;
  expect_values("bert-base", options, {torch::kDouble, torch::kFloat});
}

TEST(Values, Vit) {
  ModelOptions options = small_transformer();
  options.image_size = 32;
  options.channels = 1;
  options.classes = 10;
  expect_values("vit-b-16", options, {torch::kDouble, torch::kFloat});
}

TEST(Values, Resnet) {
  ModelOptions options;
  options.width = 3;
  options.image_size = 48;
  options.classes = 10;
  // Norms over 16 values: rounding alone causes differences of 5e-4 in float32.
  expect_values("resnet50", options, {torch::kDouble});
}

}  // namespace
}  // namespace reprise
