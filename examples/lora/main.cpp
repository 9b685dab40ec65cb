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

using torch::Tensor;

/// Rows of two sentences, of 20 to 39 and of 20 letters, and padding.
class Sentences final : public reprise::Dataset {
 public:
  int64_t size() const override { return 64; }
  int64_t count(int64_t row) const override { return 38 + row % 20; }
  reprise::Batch get(const std::vector<int64_t>& rows) const override {
    const Tensor row = torch::tensor(rows).unsqueeze(1), end = 20 + row % 20;
    const Tensor i = torch::arange(kLength + 1).unsqueeze(0);
    const Tensor letters = 'a' + (row + i) % 26;
    const Tensor number = i.lt(end) + 2 * i.ge(end) * i.lt(end + 20);
    const auto now = [](const Tensor& t) { return t.narrow(1, 0, kLength); };
    const auto next = [](const Tensor& t) { return t.narrow(1, 1, kLength); };
    const Tensor predicted = next(number).gt(0) * now(number).eq(next(number));
    return {.tensors = {now(letters),
                        next(letters).masked_fill(predicted.eq(0), -100),
                        now(number)},
            .samples = row.size(0),
            .count = predicted.sum().item<int64_t>()};
  }
  std::string description() const override { return "sentences"; }

  static constexpr int64_t kLength = 64;
};

}  // namespace

int main(int argc, char** argv) {
  const std::string weights = argc > 1 ? argv[1] : "base.safetensors";
  const std::string adapter = argc > 2 ? argv[2] : "adapter";
  torch::manual_seed(1);
  reprise::Model model = reprise::make_model(
      "llama-small", {.depth = 2, .seq = Sentences::kLength});
  if (!std::filesystem::exists(weights))
    reprise::export_weights(model, weights);
  reprise::load_weights(model, weights);
  reprise::add_lora(
      model, {.rank = 8, .alpha = 16, .targets = "q_proj,v_proj,down_proj"});

  reprise::TrainOptions options;
  options.global_batch = 16;
  options.memory_limit = reprise::parse_bytes("12MiB");
  options.epochs = 5;
  options.rate.base = 1e-2;
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
