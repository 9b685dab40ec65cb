// Operators between the matrix products of a transformer block: ops::add_norm(),
// ops::add_rms_norm(), ops::split_heads() and ops::packed_swiglu() compared with the same in
// LibTorch's operators. The time of forward and backward in bfloat16 with a float32 residual
// stream. A copy of as many bytes as have to be read and written is a lower bound.
#include "compat/autocast.h"
#include "options.h"
#include "repeated.h"
#include "side_by_side.h"

#include <reprise/ops/attention.h>
#include <reprise/ops/linear.h>
#include <reprise/ops/norm.h>
#include <reprise/version.h>

#include <fmt/format.h>
#include <torch/autograd.h>
#include <torch/nn/modules/normalization.h>
#include <torch/types.h>

#include <functional>
#include <string>
#include <vector>

namespace {

namespace ops = reprise::ops;
using torch::Tensor;

struct Block {
  std::string model;
  int64_t width, mlp_width, heads, kv_heads;
};

const Block kBlocks[] = {
    {"qwen2.5-1.5b", 1536, 8960, 12, 2},
    {"llama-3.2-1b", 2048, 8192, 32, 8},
    {"llama-3-8b", 4096, 14336, 32, 8},
    {"gpt2", 768, 3072, 12, 12},
};

constexpr int64_t kLength = 1024;  // tokens of a sample

struct Case {
  std::string name;
  std::function<void()> ours, library;
  int64_t bytes;  ///< least traffic of forward and backward
};

class Cases {
 public:
  Cases(const Block& block, int64_t tokens, torch::Device device)
      : block_(block),
        device_(device),
        length_(std::min(tokens, kLength)),
        samples_(std::max<int64_t>(1, tokens / kLength)) {}

  Case add_norm() const {
    const Tensor x = make(block_.width, torch::kFloat);
    const Tensor branch = make(block_.width, torch::kBFloat16);
    torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({block_.width}));
    norm->to(device_);
    return norm_case("add + LayerNorm", x, branch,
                     [x, branch, norm](bool fused) {
                       return fused ? ops::add_norm(x, branch, norm)
                                    : ops::fallback::add_norm(x, branch, norm);
                     });
  }
  Case add_rms_norm() const {
    const Tensor x = make(block_.width, torch::kFloat);
    const Tensor branch = make(block_.width, torch::kBFloat16);
    const Tensor weight =
        torch::ones({block_.width}, torch::device(device_)).requires_grad_();
    return norm_case(
        "add + RMS norm", x, branch, [x, branch, weight](bool fused) {
          return fused ? ops::add_rms_norm(x, branch, weight, 1e-6)
                       : ops::fallback::add_rms_norm(x, branch, weight, 1e-6);
        });
  }
  Case split_heads() const {
    const int64_t all = block_.heads + 2 * block_.kv_heads;
    const int64_t dim = block_.width / block_.heads;
    const Tensor leaf = make(all * dim, torch::kBFloat16);
    const Tensor angles =
        torch::randn({length_, dim / 2}, torch::device(device_));
    const Tensor cos = angles.cos(), sin = angles.sin();
    const auto run = [=, heads = block_.heads,
                      kv_heads = block_.kv_heads](bool fused) {
      // Neither a leaf nor a view of one, and not copied.
      const Tensor qkv = torch::_unsafe_view(leaf, leaf.sizes());
      const auto made =
          fused ? ops::split_heads(qkv, heads, kv_heads, cos, sin)
                : ops::fallback::split_heads(qkv, heads, kv_heads, cos, sin);
      torch::autograd::backward(
          {made.q, made.k, made.v},
          {made.q.detach(), made.k.detach(), made.v.detach()});
      leaf.mutable_grad() = Tensor();
    };
    const int64_t rotated = leaf.numel() / all * (all - block_.kv_heads);
    return {"split heads, rotate", [run] { run(true); }, [run] { run(false); },
            4 * rotated + 4 * leaf.numel()};
  }
  Case swiglu() const {
    const Tensor both = make(2 * block_.mlp_width, torch::kBFloat16);
    const Tensor slope = make(block_.mlp_width, torch::kBFloat16).detach();
    const auto run = [both, slope](bool fused) {
      const auto parts = both.chunk(2, -1);
      const Tensor y = fused ? ops::packed_swiglu(both)
                             : ops::fallback::swiglu(parts[0], parts[1]);
      y.backward(slope);
      both.mutable_grad() = Tensor();
    };
    return {"SwiGLU", [run] { run(true); }, [run] { run(false); },
            16 * slope.numel()};
  }

 private:
  Tensor make(int64_t columns, torch::ScalarType type) const {
    return torch::randn({samples_, length_, columns}, torch::device(device_))
        .to(type)
        .requires_grad_();
  }
  /// `run` returns the results with our kernel, or with the library.
  Case norm_case(const std::string& name, const Tensor& x, const Tensor& branch,
                 const std::function<ops::AddNormResult(bool)>& run) const {
    const Tensor slope = torch::randn_like(x).detach();
    const Tensor half = slope.to(torch::kBFloat16);
    const auto step = [=](bool fused) {
      ops::AddNormResult made;
      {
        reprise::compat::AutocastState state;
        state.cuda_enabled = x.is_cuda();
        state.cuda_dtype = torch::kBFloat16;
        const reprise::compat::AutocastGuard guard(state);
        made = run(fused);
      }
      // The next matrix product reads half precision.
      const Tensor normalized = made.normalized.to(torch::kBFloat16);
      torch::autograd::backward({made.sum, normalized}, {slope, half});
      x.mutable_grad() = Tensor();
      branch.mutable_grad() = Tensor();
    };
    return {name, [step] { step(true); }, [step] { step(false); },
            (12 + 16) * x.numel()};
  }

  Block block_;
  torch::Device device_;
  int64_t length_, samples_;
};

}  // namespace

int main(int argc, char** argv) {
  std::string place = "cpu";
  int64_t tokens = 8192;
  int repeats = 7;
  reprise::bench::Options(
      "Operators between the matrix products of a transformer block, by our "
      "kernels and by the library")
      .add_device(&place)
      .add_positive("--tokens", &tokens, "Tokens per batch")
      .add_positive("--repeats", &repeats, "Timed runs of each, alternating")
      .parse(argc, argv);
  const torch::Device device = reprise::bench::device_named(place);

  fmt::print("LibTorch {}, {}, {} tokens, forward and backward\n\n",
             reprise::libtorch_version(), place, tokens);
  fmt::print("{:<14}{:<21}{:>13}{:>11}{:>8}{:>13}\n", "model", "operator",
             "library, ms", "ours, ms", "ratio", "a copy, ms");
  for (const Block& block : kBlocks) {
    const Cases cases(block, tokens, device);
    for (const Case& c : {cases.add_norm(), cases.add_rms_norm(),
                          cases.split_heads(), cases.swiglu()}) {
      const Tensor from = torch::empty(
          {c.bytes / 2}, torch::device(device).dtype(torch::kByte));
      const Tensor to = torch::empty_like(from);
      reprise::bench::Repeated ours(device, 1, c.ours);
      reprise::bench::Repeated library(device, 1, c.library);
      reprise::bench::Repeated copy(device, 1, [&] { to.copy_(from); });
      const auto took = reprise::bench::side_by_side(
          [&] { ours(); }, [&] { library(); }, repeats);
      const auto least = reprise::bench::side_by_side([&] { copy(); },
                                                      [&] { copy(); }, repeats);
      fmt::print("{:<14}{:<21}{:>13.3f}{:>11.3f}{:>8.2f}{:>13.3f}\n",
                 block.model, c.name, took.second_ms.median,
                 took.first_ms.median, took.ratio.median,
                 least.first_ms.median);
    }
  }
  return 0;
}
