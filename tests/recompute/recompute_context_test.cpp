#include "recompute/recompute_context.h"

#include "support.h"

#include <reprise/memory/meter.h>
#include <reprise/recompute/checkpoint.h>

#include <atomic>
#include <barrier>
#include <string>
#include <thread>

namespace reprise {
namespace {

using testing::device;
using testing::on_device;
using testing::same;

/// Reads its buffer, then modifies it. A recomputation must see the old value.
struct RunningImpl : torch::nn::Module {
  RunningImpl() : buffer(register_buffer("buffer", torch::ones({1}))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    auto y = x * buffer;
    const torch::NoGradGuard no_grad;
    if (is_training()) buffer.add_(1);
    return y;
  }
  torch::Tensor buffer;
};
TORCH_MODULE(Running);

TEST(RecomputeContext, RestoresBuffersAndRandomNumbersOfTheFirstRun) {
  Running running;
  running->to(device());
  const auto x = torch::ones({4}, on_device());
  RecomputeContext context({x}, {running.ptr()});
  const auto first = running(x) + torch::rand({4}, on_device());
  context.finish_first_run();
  const auto next = compat::RngState::capture({x});
  for (int i = 0; i < 3; ++i) {
    {
      const RecomputeGuard guard(context);
      EXPECT_TRUE(is_recomputing());
      EXPECT_TRUE(same(running(x) + torch::rand({4}, on_device()), first));
    }
    EXPECT_FALSE(is_recomputing());
    EXPECT_EQ(running->buffer.item<float>(), 2);
    EXPECT_TRUE(next == compat::RngState::capture({x}));
  }
}

TEST(RecomputeContext, TurnsGradModeOn) {
  const RecomputeContext context({}, {});
  const torch::NoGradGuard no_grad;
  {
    const RecomputeGuard guard(context);
    EXPECT_TRUE(torch::GradMode::is_enabled());
  }
  EXPECT_FALSE(torch::GradMode::is_enabled());
}

TEST(RecomputeContext, CopiesNoBuffersInEvaluationMode) {
  torch::nn::BatchNorm2d norm(1000);
  norm->eval();
  const int64_t before = live_bytes(torch::kCPU);
  const RecomputeContext context({}, {norm.ptr()});
  // Only the state of the CPU's generator, about 5 KB.
  EXPECT_LT(live_bytes(torch::kCPU) - before, 6000);
}

TEST(RecomputeContext, RestoresAutocastOfTheFirstRun) {
  auto state = compat::AutocastState::current();
  state.cpu_enabled = true;
  state.cpu_dtype = torch::kBFloat16;
  const auto context = [&] {
    const compat::AutocastGuard guard(state);
    return RecomputeContext({}, {});
  }();
  const auto a = torch::ones({2, 2});
  const RecomputeGuard guard(context);
  EXPECT_EQ(torch::mm(a, a).scalar_type(), torch::kBFloat16);
}

// Two threads share LibTorch's generators.
TEST(RecomputeContext, RefusesRandomNumbersOfTwoThreadsAtOnce) {
  const auto run = [](std::barrier<>& meet, bool random) {
    const auto x = torch::ones({64}).requires_grad_();
    checkpoint(
        [&](const torch::Tensor& t) {
          meet.arrive_and_wait();  // both are in the function
          auto y = random ? torch::dropout(t, 0.5, true) : torch::sin(t);
          meet.arrive_and_wait();
          return y;
        },
        x);
  };
  const auto errors_of_two = [&](bool random) {
    std::barrier<> meet(2);
    std::atomic<int> errors{0};
    const auto body = [&] {
      try {
        run(meet, random);
      } catch (const c10::Error& error) {
        const std::string text = error.what();
        errors += text.find(
                      "expected one thread at a time to run stages that "
                      "use random numbers") != std::string::npos;
      }
    };
    std::thread one(body), two(body);
    one.join();
    two.join();
    return errors.load();
  };
  EXPECT_EQ(errors_of_two(/*random=*/true), 2);
  EXPECT_EQ(errors_of_two(/*random=*/false), 0);
  // One after the other.
  std::barrier<> alone(1);
  std::thread([&] { run(alone, true); }).join();
  run(alone, true);
}

}  // namespace
}  // namespace reprise
