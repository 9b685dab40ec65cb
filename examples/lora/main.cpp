// Fine-tunes llama-small with low-rank adapters inside a memory budget, on sentences of
// different lengths that are packed into rows:
//
//   lora [WEIGHTS [ADAPTER]]
//
// WEIGHTS is a safetensors file (default: base.safetensors, made with random values if there
// is none), ADAPTER the directory for the adapter in the format of Hugging Face's PEFT.
#include <reprise/train.h>

#include <filesystem>
#include <iostream>

namespace {

/// Rows of 64 bytes: sentences of 5 to 14 letters in alphabetical order, then padding.
class Sentences final : public reprise::Dataset {
 public:
  int64_t size() const override { return 64; }
  int64_t count(int64_t index) const override { return get({index}).count; }
  reprise::Batch get(const std::vector<int64_t>& rows) const override {
    const auto shape = {static_cast<int64_t>(rows.size()), kLength};
    const auto tokens = torch::zeros(shape, torch::kLong);
    const auto targets = torch::full(shape, -100, torch::kLong);
    const auto segments = torch::zeros(shape, torch::kLong);
    for (size_t n = 0; n < rows.size(); ++n) {
      const auto at = [&](const torch::Tensor& t) {
        return t.data_ptr<int64_t>() + n * kLength;
      };
      int64_t first = 0;
      for (int64_t document = 1;; ++document) {
        const int64_t length = 5 + (rows[n] + 3 * document) % 10;
        if (first + length > kLength) break;
        for (int64_t i = first; i < first + length; ++i) {
          at(tokens)[i] = 'a' + (rows[n] + i - first) % 26;
          at(segments)[i] = document;
          if (i > first) at(targets)[i - 1] = at(tokens)[i];
        }
        first += length;
      }
    }
    return {.tensors = {tokens, targets, segments},
            .samples = static_cast<int64_t>(rows.size()),
            .count = targets.ne(-100).sum().item<int64_t>()};
  }
  std::string description() const override { return "packed sentences"; }

 private:
  static constexpr int64_t kLength = 64;
};

}  // namespace

int main(int argc, char** argv) {
  const std::string weights = argc > 1 ? argv[1] : "base.safetensors";
  const std::string adapter = argc > 2 ? argv[2] : "adapter";
  torch::manual_seed(1);
  reprise::Model model = reprise::make_model("llama-small");
  if (!std::filesystem::exists(weights))
    reprise::export_weights(model, weights);
  reprise::load_weights(model, weights);
  reprise::add_lora(
      model, {.rank = 8, .alpha = 16, .targets = "q_proj,v_proj,down_proj"});

  reprise::TrainOptions options;
  options.global_batch = 16;
  options.memory_limit = reprise::parse_bytes("32MiB");
  options.epochs = 8;
  options.rate.base = 1e-2;
  options.resolve();
  const auto data = std::make_shared<Sentences>();
  reprise::Trainer trainer({model, {.name = "sentences", .train = data}},
                           options);
  const reprise::TrainSummary summary = trainer.run().summary;
  reprise::save_lora(trainer.model(), adapter);
  std::cout << "loss " << *summary.loss << ", peak "
            << reprise::format_bytes(summary.peak_bytes) << " of "
            << reprise::format_bytes(options.memory_limit) << "\n";
  return *summary.loss < 3 && summary.peak_bytes <= options.memory_limit ? 0
                                                                         : 1;
}
