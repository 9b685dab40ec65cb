#include "compat/cuda_graph.h"

#include "compat/cuda.h"
#include "compat/rng.h"
#include "support.h"

#include <reprise/recompute/checkpoint.h>
#include <reprise/recompute/strategy.h>

#include <memory>

namespace reprise::compat {
namespace {

using reprise::testing::device;
using reprise::testing::error_of;
using reprise::testing::on_device;
using reprise::testing::same;
using reprise::testing::take_gradients;

#define REPRISE_NEEDS_CUDA()                     \
  if (!device().is_cuda()) {                     \
    GTEST_SKIP() << "graphs need a CUDA device"; \
  }                                              \
  const GraphStreamScope stream(device(), true)

std::unique_ptr<CudaGraph> new_graph() {
  return std::make_unique<CudaGraph>(device().index(),
                                     std::make_shared<CudaGraphPool>());
}

TEST(CudaGraph, IsRefusedWithAReasonWhereThereIsNoCuda) {
  if (cuda_built()) GTEST_SKIP() << "this LibTorch has CUDA";
  EXPECT_FALSE(cuda_graph_unavailable_reason().empty());
  EXPECT_NE(error_of([] {
              CudaGraph(0, std::make_shared<CudaGraphPool>());
            }).find(cuda_graph_unavailable_reason()),
            std::string::npos);
  const GraphStreamScope nothing(torch::kCPU, true);
  const auto generator = at::globalContext().defaultGenerator(at::kCPU);
  EXPECT_FALSE(captured_rng_offset(generator).has_value());
}

TEST(CudaGraph, ReplaysOnWhatItsTensorsHoldByThen) {
  REPRISE_NEEDS_CUDA();
  auto x = torch::ones({1000}, on_device());
  auto sum = torch::zeros({}, on_device());
  sum.add_((2 * x).sum());  // sets the libraries up
  sum.zero_();
  const auto graph = new_graph();
  graph->capture([&] { sum.add_((2 * x).sum()); });
  EXPECT_EQ(sum.item<float>(), 0);  // nothing ran
  graph->replay();
  EXPECT_EQ(sum.item<float>(), 2000);
  x.fill_(3);
  graph->replay();
  EXPECT_EQ(sum.item<float>(), 8000);
  EXPECT_GE(graph->bytes(), 0);
}

TEST(CudaGraph, RandomNumbersAreNewInEveryReplayAndThoseOfAPlainRun) {
  REPRISE_NEEDS_CUDA();
  auto out = torch::empty({1000}, on_device());
  const auto body = [&] { out.copy_(torch::rand({1000}, on_device())); };
  body();
  const auto start = RngState::capture({out});
  std::vector<torch::Tensor> expected;
  for (int i = 0; i < 3; ++i) {
    body();
    expected.push_back(out.clone());
  }
  const auto end = RngState::capture({out});
  const auto graph = new_graph();
  graph->capture(body);
  start.restore();
  for (int i = 0; i < 3; ++i) {
    graph->replay();
    EXPECT_TRUE(torch::equal(out, expected[static_cast<size_t>(i)])) << i;
  }
  EXPECT_FALSE(torch::equal(expected[0], expected[1]));
  EXPECT_TRUE(RngState::capture({out}) == end);
}

TEST(CudaGraph, AStatePutBackInACaptureRepeatsTheNumbers) {
  REPRISE_NEEDS_CUDA();
  auto out = torch::empty({4, 1000}, on_device());
  const auto body = [&] {
    const auto state = RngState::capture({out});
    out[0].copy_(torch::rand({1000}, on_device()));
    out[1].copy_(torch::rand({1000}, on_device()));
    {
      const RngGuard again(state);
      out[2].copy_(torch::rand({1000}, on_device()));
    }
    out[3].copy_(torch::rand({1000}, on_device()));
    auto unused = RngState::capture({out});
    unused.forget_unchanged(RngState::capture_like(unused));
    EXPECT_TRUE(unused.states().empty());
  };
  body();
  const auto start = RngState::capture({out});
  body();
  const auto expected = out.clone();
  const auto end = RngState::capture({out});
  const auto graph = new_graph();
  graph->capture(body);
  start.restore();
  graph->replay();
  EXPECT_TRUE(torch::equal(out, expected));
  EXPECT_TRUE(torch::equal(out[0], out[2]));
  EXPECT_FALSE(torch::equal(out[1], out[3]));
  EXPECT_TRUE(RngState::capture({out}) == end);
  const auto first = out.clone();
  graph->replay();
  EXPECT_TRUE(torch::equal(out[0], out[2]));
  EXPECT_FALSE(torch::equal(out[0], first[0]));
}

TEST(CudaGraph, AStateOfACaptureCannotBePutBackOutside) {
  REPRISE_NEEDS_CUDA();
  auto out = torch::empty({10}, on_device());
  RngState inside;
  const auto graph = new_graph();
  graph->capture([&] {
    inside = RngState::capture({out});
    out.zero_();
  });
  EXPECT_NE(error_of([&] { inside.restore(); }).find("outside"),
            std::string::npos);
}

/// A stage with dropout, and one that adds up and shows the mask.
Chain masked(torch::nn::Linear linear) {
  return Chain({make_stage("dropout",
                           [linear](const torch::Tensor& x) mutable {
                             return torch::dropout(linear->forward(x), 0.5,
                                                   true);
                           },
                           {linear.ptr()}),
                make_stage("square", [](const torch::Tensor& x) {
                  return Tensors{(x * x).sum(), x.detach().ne(0)};
                })});
}

TEST(CudaGraph, ARecomputedStageHasTheMaskOfItsFirstRun) {
  REPRISE_NEEDS_CUDA();
  torch::manual_seed(3);
  torch::nn::Linear linear(64, 64);
  linear->to(device());
  const auto x = torch::randn({16, 64}, on_device());
  for (const char* strategy : {"none", "all"}) {
    Execution execution(masked(linear), make_schedule(strategy, 2));
    auto mask = torch::zeros({16, 64}, on_device(torch::kBool));
    const auto body = [&] {
      const Tensors outputs = execution.forward({x});
      execution.backward({torch::ones_like(outputs[0]), {}});
      mask.copy_(outputs[1]);
    };
    body();
    auto parameters = linear->parameters();
    for (auto& parameter : parameters) parameter.mutable_grad().zero_();
    const auto graph = new_graph();
    graph->capture(body);
    torch::Tensor before;
    for (int i = 0; i < 3; ++i) {
      for (auto& parameter : parameters) parameter.mutable_grad().zero_();
      graph->replay();
      const auto found = linear->weight.grad().clone();
      // The gradient by hand, with the mask that the replay gave out.
      const auto y = linear->forward(x) * 2 * mask;
      const auto upstream = (2 * y * 2 * mask).detach();
      EXPECT_TRUE(same(found, upstream.t().mm(x))) << strategy << " " << i;
      if (before.defined()) {
        EXPECT_FALSE(torch::equal(before, mask));
      }
      before = mask.clone();
    }
    take_gradients(parameters);
  }
}

TEST(CudaGraph, ACheckpointInsideIsRightToo) {
  REPRISE_NEEDS_CUDA();
  torch::manual_seed(4);
  torch::nn::Linear linear(32, 32);
  linear->to(device());
  const auto x = torch::randn({8, 32}, on_device());
  auto mask = torch::zeros({8, 32}, on_device(torch::kBool));
  const auto body = [&] {
    const auto y = checkpoint(
        [linear](const torch::Tensor& in) mutable {
          return torch::dropout(linear->forward(in), 0.5, true);
        },
        x);
    mask.copy_(y.detach().ne(0));
    (y * y).sum().backward();
  };
  body();
  linear->weight.mutable_grad().zero_();
  linear->bias.mutable_grad().zero_();
  const auto graph = new_graph();
  graph->capture(body);
  graph->replay();
  const auto y = linear->forward(x) * 2 * mask;
  EXPECT_TRUE(
      same(linear->weight.grad(), (2 * y * 2 * mask).detach().t().mm(x)));
}

TEST(CudaGraph, AFailedCaptureLeavesNothingBehind) {
  REPRISE_NEEDS_CUDA();
  auto x = torch::ones({1000}, on_device());
  auto out = torch::zeros({1000}, on_device());
  const auto rng = RngState::capture({x});
  cuda_synchronize(device().index());
  for (int i = 0; i < 3; ++i) {
    const auto graph = new_graph();
    EXPECT_FALSE(error_of([&] {
                   graph->capture([&] {
                     out.copy_(torch::rand({1000}, on_device()));
                     out.mul_(x.sum().item<float>());  // waits for the device
                   });
                 }).empty());
    EXPECT_THROW(graph->replay(), c10::Error);
    // The generator, the allocator and the stream work as before.
    EXPECT_TRUE(RngState::capture({x}) == rng);
    torch::rand({1000}, on_device());
    rng.restore();
    out.copy_(2 * x);
    EXPECT_EQ(out.sum().item<float>(), 2000);
  }
  const auto graph = new_graph();
  graph->capture([&] { out.copy_(3 * x); });
  graph->replay();
  EXPECT_EQ(out.sum().item<float>(), 3000);
}

TEST(CudaGraph, AThousandReplaysTakeNoMemory) {
  REPRISE_NEEDS_CUDA();
  auto x = torch::randn({256, 256}, on_device());
  auto out = torch::zeros({256, 256}, on_device());
  const auto body = [&] { out.add_(torch::dropout(x.mm(x), 0.1, true)); };
  body();
  const auto graph = new_graph();
  graph->capture(body);
  graph->replay();
  cuda_synchronize(device().index());
  const auto before = cuda_memory(device().index());
  for (int i = 0; i < 1000; ++i) graph->replay();
  cuda_synchronize(device().index());
  const auto after = cuda_memory(device().index());
  EXPECT_EQ(after.allocated, before.allocated);
  EXPECT_EQ(after.reserved, before.reserved);
}

TEST(CudaGraph, GraphsOfOnePoolShareTheirMemory) {
  REPRISE_NEEDS_CUDA();
  auto x = torch::randn({1024, 1024}, on_device());
  auto out = torch::zeros({1024, 1024}, on_device());
  const auto body = [&] { out.copy_((x + 1) * (x + 2) * (x + 3)); };
  body();
  const auto pool = std::make_shared<CudaGraphPool>();
  CudaGraph first(device().index(), pool);
  CudaGraph second(device().index(), pool);
  first.capture(body);
  second.capture(body);
  EXPECT_GT(first.bytes(), 0);
  EXPECT_EQ(second.bytes(), 0);
  first.replay();
  second.replay();
  EXPECT_TRUE(same(out, (x + 1) * (x + 2) * (x + 3)));
}

}  // namespace
}  // namespace reprise::compat
