// A model and a dataset that Reprise does not have, with everything that the command does:
//
//   own_model train --model tagger --memory 24MiB --global-batch 32 --out run
//   own_model train --resume run --epochs 3
//   own_model plan --model tagger --global-batch 32 --memory 24MiB
//   own_model verify --model tagger
//   own_model launch -n 2 -- train --model tagger --batch 8
//   own_model study my.yaml          # with model: tagger
#include <reprise/command.h>
#include <reprise/train.h>

#include <torch/torch.h>

namespace {

using torch::Tensor;

/// Sentences of 32 words, each with a tag that depends on the word and the one before it.
/// Sentences have different lengths: the rest is masked out.
class Sentences final : public reprise::Dataset {
 public:
  explicit Sentences(const reprise::DataOptions& options) {
    const bool train = options.split == reprise::Split::kTrain;
    auto generator = at::detail::createCPUGenerator(train ? 1 : 2);
    words_ = torch::randint(100, {train ? 512 : 64, kLength}, generator,
                            torch::kLong);
    tags_ = (words_ + words_.roll(1, 1)) % kTags;
    lengths_ = torch::randint(8, kLength + 1, {words_.size(0)}, generator,
                              torch::kLong);
  }
  int64_t size() const override { return words_.size(0); }
  int64_t count(int64_t i) const override {
    return lengths_[i].item<int64_t>();  // tagged words
  }
  reprise::Batch get(const std::vector<int64_t>& indices) const override {
    const auto rows = torch::tensor(indices);
    const Tensor lengths = lengths_.index_select(0, rows);
    const Tensor mask =
        torch::arange(kLength).unsqueeze(0) < lengths.unsqueeze(1);
    return {.tensors = {words_.index_select(0, rows), mask,
                        tags_.index_select(0, rows)},
            .samples = static_cast<int64_t>(indices.size()),
            .count = lengths.sum().item<int64_t>()};
  }
  std::string description() const override { return "tagged sentences"; }

  static constexpr int64_t kLength = 32, kTags = 7;

 private:
  Tensor words_, tags_, lengths_;
};

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : conv(register_module(
            "conv", torch::nn::Conv1d(
                        torch::nn::Conv1dOptions(width, width, 3).padding(1)))),
        norm(register_module(
            "norm",
            torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))) {}
  Tensor forward(const Tensor& x) {
    return x + torch::gelu(conv(norm(x).transpose(1, 2)).transpose(1, 2));
  }
  torch::nn::Conv1d conv;
  torch::nn::LayerNorm norm;
};
TORCH_MODULE(Block);

/// A chain on {words, mask, tags}: the blocks change the first tensor only.
reprise::Model make_tagger(const reprise::ModelOptions& options) {
  auto root = std::make_shared<torch::nn::Module>();
  auto embed =
      root->register_module("embed", torch::nn::Embedding(100, options.width));
  auto head = root->register_module(
      "head", torch::nn::Linear(options.width, Sentences::kTags));
  std::vector<reprise::Stage> stages = {
      reprise::make_stage("embed", embed).on_first()};
  for (int64_t i = 0; i < options.depth; ++i) {
    const std::string name = "block" + std::to_string(i);
    const auto block = root->register_module(name, Block(options.width));
    stages.push_back(reprise::make_stage(name, block).on_first());
  }
  stages.push_back(reprise::make_stage(
      "loss",
      [head, root](const Tensor& x, const Tensor& mask, const Tensor& tags) {
        const Tensor scores = head->forward(x).transpose(1, 2);
        const Tensor losses = torch::nn::functional::cross_entropy(
            scores, tags,
            torch::nn::functional::CrossEntropyFuncOptions().reduction(
                torch::kNone));
        reprise::Tensors sums = {(losses * mask).sum()};
        if (root->is_training()) return sums;
        sums.push_back(
            (scores.argmax(1).eq(tags) * mask).sum().to(torch::kDouble));
        return sums;
      },
      {head}));
  return {
      .root = root, .chain = reprise::Chain(stages), .metrics = {"accuracy"}};
}

void register_tagger() {
  reprise::ModelOptions defaults;
  defaults.depth = 6;
  defaults.width = 64;
  reprise::register_model({.name = "tagger",
                           .description = "convolutions that tag words",
                           .defaults = defaults,
                           .make = make_tagger,
                           .data = "sentences"});
  reprise::register_dataset(
      {.name = "sentences", .open = [](const reprise::DataOptions& options) {
         return std::make_shared<Sentences>(options);
       }});
}

}  // namespace

int main(int argc, char** argv) {
  return reprise::run_command(argc, argv, register_tagger);
}
