// A program whose own model is trained by two ranks. It starts itself again as the ranks:
//
//   ranks            launches two ranks, then trains alone and compares
//   torchrun …       or mpirun, srun: joins the ranks that they have started
//
// Checks that two ranks, which share each window, give the weights of one process. They
// differ by rounding only, because gradients are added in another order.
#include <reprise/train.h>

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <unistd.h>
#include <vector>

namespace {

using torch::Tensor;

constexpr int64_t kSamples = 96;
constexpr int64_t kInputs = 16, kWidth = 64;

/// Random points and a function of them.
class Points final : public reprise::Dataset {
 public:
  Points() {
    auto generator = at::detail::createCPUGenerator(1);
    x_ = torch::randn({kSamples, kInputs}, generator);
    y_ = torch::sin(x_.sum(1, /*keepdim=*/true));
  }
  int64_t size() const override { return kSamples; }
  reprise::Batch get(const std::vector<int64_t>& indices) const override {
    const Tensor rows = torch::tensor(indices);
    const auto n = static_cast<int64_t>(indices.size());
    return {.tensors = {x_.index_select(0, rows), y_.index_select(0, rows)},
            .samples = n,
            .count = n};
  }
  std::string description() const override { return "random points"; }

 private:
  Tensor x_, y_;
};

/// Model and data, the same in every process.
reprise::TrainInputs make_inputs() {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(kInputs, kWidth),
                            torch::nn::GELU(),
                            torch::nn::Linear(kWidth, kWidth),
                            torch::nn::GELU(), torch::nn::Linear(kWidth, 1));
  std::vector<reprise::Stage> stages;
  const reprise::Chain layers(net);
  for (int i = 0; i < layers.size(); ++i) {
    stages.push_back(layers[i].on_first());
  }
  stages.push_back(reprise::make_stage(
      "loss",
      [](const Tensor& x, const Tensor& y) { return (x - y).square().sum(); }));
  return {.model = {.name = "own",
                    .root = net.ptr(),
                    .chain = reprise::Chain(stages)},
          .data = {.name = "points", .train = std::make_shared<Points>()}};
}

/// Trains 24 updates, with the other ranks if there are some, and writes the weights.
void train(const std::string& weights) {
  reprise::TrainOptions options;
  options.global_batch = 32;  // shared by the ranks
  options.batch = 4;
  options.optimizer.name = "sgd";
  options.optimizer.momentum = 0.9;
  options.rate.base = 0.02;
  options.steps = 24;
  options.recompute = "sqrt";
  options.workers = 1;
  reprise::RunOptions run;
  run.export_path = weights;
  const auto result = reprise::run_training(
      options, [](const reprise::TrainOptions&) { return make_inputs(); }, run);
  if (result.rank > 0) return;
  std::cout << "trained " << result.training.summary.steps << " updates with "
            << result.training.summary.ranks << " rank(s)\n";
}

}  // namespace

int main(int argc, char** argv) {
  // A rank, started by this program or by a launcher; the argument is the file to write.
  if (reprise::rank_info_from_environment()) {
    train(argc > 1 ? argv[1] : "ranks.safetensors");
    return 0;
  }
  namespace fs = std::filesystem;
  const fs::path base =
      fs::temp_directory_path() / ("ranks." + std::to_string(getpid()));
  const std::string shared = base.string() + ".two.safetensors";
  const std::string alone = base.string() + ".one.safetensors";
  const std::string self = fs::read_symlink("/proc/self/exe");
  const int status = reprise::launch_ranks(
      {.ranks = 2, .argv = {self, shared}, .say = [](const std::string& line) {
         std::cerr << line << '\n';
       }});
  if (status != 0) return status;
  train(alone);

  double most = 0;
  const reprise::SafeTensors one(alone), two(shared);
  for (const auto& [name, entry] : one.entries()) {
    const Tensor a = one.read(name), b = two.read(name);
    most = std::max(most, ((a - b).abs().max() / a.abs().max()).item<double>());
  }
  fs::remove(shared);
  fs::remove(alone);
  std::cout << "largest relative difference of the weights: " << most << '\n';
  return most < 1e-4 ? 0 : 1;
}
