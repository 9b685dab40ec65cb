// Three kinds of data for the trainer:
//
//   own_dataset sequences        a dataset of sequences of different lengths
//   own_dataset torch            a dataset and a sampler of torch::data
//   own_dataset stream RUN 5     an endless stream; the process is killed in update 5
//   own_dataset stream RUN       continues, as if it had never been killed
#include <reprise/data/torch_data.h>
#include <reprise/train.h>

#include <torch/torch.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <string>

namespace {

using torch::Tensor;

constexpr int64_t kWidth = 8;

/// Predicts a value per vector of {vectors, mask, values} or {vectors, values}.
reprise::Model make_net() {
  torch::manual_seed(1);
  auto root = std::make_shared<torch::nn::Module>();
  std::vector<reprise::Stage> stages;
  for (const std::string name : {"first", "second"}) {
    auto layer = root->register_module(name, torch::nn::Linear(kWidth, kWidth));
    stages.push_back(
        reprise::make_stage(
            name,
            [layer](const Tensor& x) { return torch::gelu(layer->forward(x)); },
            {layer})
            .on_first());
  }
  auto head = root->register_module("head", torch::nn::Linear(kWidth, 1));
  stages.push_back(reprise::make_stage(
      "loss",
      [head](const reprise::Tensors& in) {
        const Tensor errors =
            (head->forward(in[0]).squeeze(-1) - in.back()).square();
        return reprise::Tensors{in.size() == 3 ? (errors * in[1]).sum()
                                               : errors.sum()};
      },
      {head}));
  return {.name = "net", .root = root, .chain = reprise::Chain(stages)};
}

/// Vectors whose value is the sum of their numbers.
Tensor vectors(int64_t count, uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  return torch::randn({count, kWidth}, generator, torch::kFloat);
}

/// 256 sequences of 1 to 16 vectors, padded to 16.
class Sequences final : public reprise::Dataset {
 public:
  int64_t size() const override { return 256; }
  int64_t count(int64_t i) const override { return 1 + i * 7 % kLongest; }
  reprise::Batch get(const std::vector<int64_t>& indices) const override {
    std::vector<Tensor> list;
    for (const int64_t i : indices) {
      list.push_back(vectors(count(i), static_cast<uint64_t>(i)));
    }
    // With a fixed length, all micro-batches need the same memory, as planned.
    const auto padded = reprise::pad_batch(list, {.length = kLongest});
    return {.tensors = {padded.values, padded.mask, padded.values.sum(-1)},
            .samples = static_cast<int64_t>(indices.size()),
            .count = padded.lengths.sum().item<int64_t>()};
  }
  std::string description() const override { return "sequences"; }

 private:
  static constexpr int64_t kLongest = 16;
};

/// A dataset of torch::data with a transform, in the order of a sampler.
std::shared_ptr<const reprise::Dataset> open_torch_data() {
  namespace td = torch::data;
  const auto rows =
      td::datasets::TensorDataset(vectors(256, 1))
          .map(td::transforms::Lambda<td::TensorExample, td::Example<>>(
              [](td::TensorExample row) {
                return td::Example<>(row.data, row.data.sum());
              }))
          .map(td::transforms::Stack<>());
  return reprise::with_order(
      reprise::from_torch(rows, {.name = "rows"}),
      reprise::order_from(td::samplers::RandomSampler(256)));
}

/// Vectors without end. The position is the number of those read.
class Generator final : public reprise::StreamDataset {
 public:
  std::unique_ptr<reprise::SampleStream> open(
      const std::string& position) const override {
    return std::make_unique<Reader>(position.empty() ? 0
                                                     : std::stoll(position));
  }
  std::string description() const override { return "generator"; }

 private:
  class Reader final : public reprise::SampleStream {
   public:
    explicit Reader(int64_t at) : at_(at) {}
    reprise::Batch read(int64_t samples) override {
      std::vector<Tensor> list;
      for (int64_t i = 0; i < samples; ++i) {
        list.push_back(vectors(1, static_cast<uint64_t>(at_++)));
      }
      const Tensor x = torch::cat(list);
      return {.tensors = {x, x.sum(-1)}, .samples = samples, .count = samples};
    }
    std::string position() const override { return std::to_string(at_); }

   private:
    int64_t at_;
  };
};

/// Kills the process in an update.
struct Killer : reprise::TrainListener {
  explicit Killer(int64_t step) : at(step) {}
  void updated(int64_t step) override {
    if (step == at) std::raise(SIGKILL);
  }
  int64_t at;
};

void train(const std::shared_ptr<const reprise::Dataset>& data,
           const reprise::RunOptions& run = {}) {
  reprise::TrainOptions options;
  options.batch = 12;  // windows of 12, 12 and 8 samples
  options.global_batch = 32;
  options.steps = 20;
  options.save_every = 1;
  options.rate.base = 0.01;
  reprise::Model model = make_net();
  const auto result = reprise::run_training(
      options,
      [&](const reprise::TrainOptions&) {
        return reprise::TrainInputs{model, {.name = "own", .train = data}};
      },
      run);
  double sum = 0;
  for (const auto& p : model.root->parameters()) {
    sum += p.abs().sum().item<double>();
  }
  std::printf("%s: %ld updates, loss %.4f, weights %.17g\n",
              data->description().c_str(),
              static_cast<long>(result.training.summary.steps),
              result.training.summary.loss.value_or(0), sum);
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "sequences") {
    train(std::make_shared<Sequences>());
  } else if (what == "torch") {
    train(open_torch_data());
  } else if (what == "stream" && argc > 2) {
    const std::string path = argv[2];
    reprise::RunOptions run;
    (std::filesystem::exists(path) ? run.resume : run.out) = path;
    const int64_t killed = argc > 3 ? std::stoll(argv[3]) : 0;
    run.listener = [killed](std::FILE*) {
      return std::make_unique<Killer>(killed);
    };
    train(std::make_shared<Generator>(), run);
  } else {
    std::fprintf(stderr, "usage: own_dataset sequences|torch|stream RUN [N]\n");
    return 2;
  }
  return 0;
} catch (const c10::Error& error) {
  std::fprintf(stderr, "%s\n", error.what_without_backtrace());
  return 1;
}
