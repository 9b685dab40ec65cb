// Overhead of the executor: forward and backward of a model in a plain LibTorch loop
// and as a chain with the schedule "none", in alternation. Also measures the overhead
// of the counting allocator compared with LibTorch's own.
#include "compat/cuda.h"
#include "options.h"
#include "side_by_side.h"

#include <reprise/memory/meter.h>
#include <reprise/recompute/execution.h>
#include <reprise/recompute/strategy.h>
#include <reprise/version.h>

#include <c10/core/CPUAllocator.h>
#include <fmt/format.h>
#include <torch/nn.h>
#include <torch/types.h>

#include <malloc.h>

namespace {

using reprise::bench::side_by_side;
using torch::Tensor;

struct Model {
  std::string name;
  torch::nn::Sequential net;
  Tensor input;
};

struct ConvBlockImpl : torch::nn::Module {
  ConvBlockImpl(int64_t from, int64_t to)
      : conv(register_module(
            "conv", torch::nn::Conv2d(
                        torch::nn::Conv2dOptions(from, to, 3).padding(1)))),
        norm(register_module("norm", torch::nn::BatchNorm2d(to))) {}
  Tensor forward(const Tensor& x) { return torch::relu(norm(conv(x))); }
  torch::nn::Conv2d conv;
  torch::nn::BatchNorm2d norm;
};
TORCH_MODULE(ConvBlock);

std::vector<Model> make_models(bool small, torch::Device device) {
  const int64_t scale = small ? 1 : 8;
  std::vector<Model> models;

  torch::nn::Sequential mlp;
  for (int i = 0; i < 16; ++i) {
    mlp->push_back(torch::nn::Linear(64 * scale, 64 * scale));
    mlp->push_back(torch::nn::ReLU());
    mlp->push_back(torch::nn::Dropout(0.1));
  }
  models.push_back(
      {"mlp, 48 stages", mlp, torch::randn({32 * scale, 64 * scale}, device)});

  torch::nn::Sequential cnn;
  int64_t channels = 3;
  for (const int64_t next : {16, 32, 32, 64, 64, 64}) {
    cnn->push_back(ConvBlock(channels, next));
    channels = next;
  }
  models.push_back(
      {"cnn, 6 stages", cnn,
       torch::randn({2 * scale, 3, 4 * scale, 4 * scale}, device)});

  torch::nn::Sequential encoder;
  for (int i = 0; i < 6; ++i) {
    encoder->push_back(torch::nn::TransformerEncoderLayer(
        torch::nn::TransformerEncoderLayerOptions(32 * scale, 4)
            .dim_feedforward(128 * scale)));
  }
  models.push_back({"transformer, 6 stages", encoder,
                    torch::randn({16 * scale, 8, 32 * scale}, device)});

  for (auto& model : models) model.net->to(device);
  return models;
}

bool same_gradients(Model& model, const std::function<void()>& bare,
                    const std::function<void()>& executor) {
  const auto gradients_of = [&](const std::function<void()>& step) {
    model.net->zero_grad();
    torch::manual_seed(1);
    step();
    std::vector<Tensor> gradients;
    for (const auto& p : model.net->parameters()) {
      gradients.push_back(p.grad().clone());
    }
    return gradients;
  };
  const auto expected = gradients_of(bare);
  const auto got = gradients_of(executor);
  for (size_t i = 0; i < expected.size(); ++i) {
    const bool close = model.input.is_cuda()
                           ? torch::allclose(got[i], expected[i], 1e-3, 1e-5)
                           : torch::equal(got[i], expected[i]);
    if (!close) return false;
  }
  return true;
}

/// Runs `step` with LibTorch's CPU allocator and with the counting one. Memory is freed
/// by the allocator that allocated it.
reprise::bench::SideBySide counting_cost(const std::function<void()>& step,
                                         int repeats) {
  auto* counting = c10::GetCPUAllocator();
  auto* plain = c10::GetDefaultCPUAllocator();
  const auto with = [&](c10::Allocator* allocator) {
    c10::SetCPUAllocator(allocator, /*priority=*/255);
    step();
  };
  return side_by_side([&] { with(plain); }, [&] { with(counting); }, repeats);
}

void print_row(const std::string& name,
               const reprise::bench::SideBySide& result) {
  fmt::print("{:<34}{:>10.2f}{:>10.2f}{:>9.3f}{:>9.3f} … {:.3f}\n", name,
             result.first_ms.median, result.second_ms.median,
             result.ratio.median, result.ratio.low, result.ratio.high);
}

}  // namespace

int main(int argc, char** argv) {
  std::string device_name = "cpu";
  int repeats = 21;
  int threads = 1;
  double limit = 0;
  bool small = false;
  reprise::bench::Options(
      "Overhead of the executor compared with a plain LibTorch loop")
      .add_device(&device_name)
      .add_positive("--repeats", &repeats, "Number of pairs of runs")
      .add_positive("--threads", &threads, "Number of CPU threads")
      .add("--limit", &limit,
           "Exit with status 1 if a median ratio is above this (0: never)")
      .add_flag("--small", &small, "Use tiny models, as a smoke test")
      .parse(argc, argv);

  // Otherwise page faults of freed and reallocated memory dominate the measurement.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_TOP_PAD, 256 << 20);
  reprise::count_cpu_memory();
  at::set_num_threads(threads);
  const torch::Device device = reprise::bench::device_named(device_name);
  const auto wait = [&] {
    if (device.is_cuda()) reprise::compat::cuda_synchronize(device.index());
  };
  bool good = true;
  fmt::print("LibTorch {}, {}, {} pairs\n\n", reprise::libtorch_version(),
             device_name, repeats);
  fmt::print("{:<34}{:>10}{:>10}{:>9}{:>18}\n", "model", "loop ms", "chain ms",
             "ratio", "quartiles");
  for (Model& model : make_models(small, device)) {
    const reprise::Chain chain(model.net);
    reprise::Execution execution(chain,
                                 reprise::make_schedule("none", chain.size()));
    const auto bare = [&] {
      const Tensor output = model.net->forward(model.input);
      output.backward(torch::ones_like(output));
      wait();
    };
    const auto with_executor = [&] {
      const auto outputs = execution.forward({model.input});
      execution.backward({torch::ones_like(outputs[0])});
      wait();
    };
    if (!same_gradients(model, bare, with_executor)) {
      fmt::print("{}: the gradients differ\n", model.name);
      return 1;
    }
    const auto result = side_by_side(bare, with_executor, repeats);
    print_row(model.name, result);
    good &= limit == 0 || result.ratio.median <= limit;
    if (device.is_cpu()) {
      print_row("  memory counted / not counted", counting_cost(bare, repeats));
    }
  }
  return good ? 0 : 1;
}
