#include "memory/failure.h"
#include "support.h"
#include "train/optim/dynamic_quantization.h"
#include "train/optim/optimizer_values.h"

#include <reprise/memory/meter.h>
#include <reprise/train/optimizer.h>

#include <nlohmann/json.hpp>
#include <torch/autograd.h>

#include <bit>
#include <cmath>
#include <map>

namespace reprise {
namespace {

using nlohmann::json;
using testing::copy_of;
using testing::error_of;
using testing::on_device;
using testing::optimizer_values;
using testing::relative_error;
using testing::same;
using torch::Tensor;

OptimizerOptions options_of(const std::string& name, double decay = 0.01) {
  OptimizerOptions options;
  options.name = name;
  options.weight_decay = decay;
  return options;
}

std::map<std::string, Tensor> state_of(const Optimizer& optimizer) {
  const auto state = optimizer.state();
  return {state.begin(), state.end()};
}

/// Returns parameters that cover the special cases: sizes that are and are not
/// a multiple of the block, more than one chunk, too few values to be
/// quantized, and strides that are not contiguous.
NamedTensors make_parameters() {
  torch::manual_seed(3);
  NamedTensors parameters = {
      {"blocks", torch::randn({64, 128}, on_device())},
      {"rest", torch::randn({71, 67}, on_device())},
      {"large", torch::randn({600, 1001}, on_device())},
      {"small", torch::randn({4095}, on_device())},
      {"turned", torch::randn({96, 80}, on_device()).t()},
      {"embedding", torch::randn({100, 64}, on_device())}};
  for (auto& item : parameters) item.second.requires_grad_();
  return parameters;
}

/// Sets the gradients of update `k`, whose values differ by factors of up to a
/// million within a block.
void set_gradients(const NamedTensors& parameters, uint64_t k) {
  torch::manual_seed(100 + k);
  for (const auto& [name, parameter] : parameters) {
    const auto sizes = torch::randn(parameter.sizes(), on_device());
    parameter.mutable_grad() =
        torch::randn(parameter.sizes(), on_device()) * (3 * sizes).exp();
  }
}

std::vector<uint8_t> bytes_of(const std::string& hex) {
  std::vector<uint8_t> bytes;
  for (size_t i = 0; i < hex.size(); i += 2) {
    bytes.push_back(
        static_cast<uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

TEST(Adam8bit, CodesMatchThePaper) {
  for (const bool with_sign : {true, false}) {
    const auto code = dynamic_code(with_sign);
    const auto expected =
        optimizer_values()["codes"][with_sign ? "signed" : "unsigned"]
            .get<std::vector<double>>();
    ASSERT_EQ(expected.size(), code.size());
    for (size_t i = 0; i < code.size(); ++i) {
      EXPECT_NEAR(code[i], expected[i], 1e-7 * std::abs(expected[i])) << i;
    }
  }
}

/// Compares the table lookup of the optimizer with a search over all codes.
TEST(Adam8bit, FindsTheNearestCode) {
  for (const bool with_sign : {true, false}) {
    const auto code = dynamic_code(with_sign);
    const auto nearest = nearest_code(code, !with_sign);
    const auto found = [&](float x) {
      const auto bits = std::bit_cast<int32_t>(x);
      const int64_t cell =
          (int64_t{bits} >> NearestCode::kCellShift) + NearestCode::kCells / 2;
      const size_t first = nearest.first.at(static_cast<size_t>(cell));
      return first + (x > nearest.above.at(first));
    };
    const auto expect_nearest = [&](float x) {
      const size_t i = found(x);
      ASSERT_LT(i, 256u) << x;
      for (size_t j = with_sign ? 0 : 1; j < 256; ++j) {
        ASSERT_LE(std::abs(x - code[i]),
                  std::abs(x - code[j]) + 1e-6f * std::abs(x))
            << x;
      }
      ASSERT_TRUE(with_sign || i > 0) << x;
    };
    for (size_t i = 0; i < 256; ++i) {
      EXPECT_EQ(found(code[i]), with_sign || i > 0 ? i : 1);
      const float edge = nearest.above[i];
      if (std::abs(edge) >= 1) continue;
      expect_nearest(std::nextafter(edge, -2.f));
      expect_nearest(std::nextafter(edge, 2.f));
    }
    for (int i = with_sign ? -100000 : 0; i <= 100000; ++i) {
      const float x = static_cast<float>(i) / 100000;
      expect_nearest(x);
      expect_nearest(x * x * x);
    }
    EXPECT_EQ(found(std::nanf("")), 255u);
  }
}

TEST(Adam8bit, MatchesAnIndependentImplementation) {
  for (const json& test : optimizer_values()["quantized"]) {
    OptimizerOptions options;
    options.name = test["options"]["name"];
    options.beta1 = test["options"].value("beta1", options.beta1);
    options.beta2 = test["options"].value("beta2", options.beta2);
    options.eps = test["options"].value("eps", options.eps);
    options.weight_decay = test["options"]["weight_decay"];
    const int64_t size = test["size"];
    const auto given = [](int64_t i, int64_t k) {
      return static_cast<float>((i * 7919 + k * 104729) % 20011 - 10005) / 8192;
    };
    const auto values = [&](auto&& value) {
      const auto tensor = torch::empty({size});
      for (int64_t i = 0; i < size; ++i) {
        tensor.data_ptr<float>()[i] = value(i);
      }
      return tensor.view({50, 100}).to(testing::device());
    };
    const auto p = values([&](int64_t i) { return given(i, 9); });
    const auto optimizer = make_optimizer(options, {{"p", p}});
    for (int64_t k = 0; k < test["updates"]; ++k) {
      p.mutable_grad() = values([&](int64_t i) {
        return i / 256 == 1 ? 0
                            : std::ldexp(given(i, k),
                                         -static_cast<int>((5 * i + k) % 17));
      });
      optimizer->step(optimizer_values()["rates"][k]);
    }
    const auto expected = torch::tensor(
        test["parameter"].get<std::vector<double>>(), torch::kDouble);
    const auto got = p.detach().cpu().view(-1).slice(0, 0, size, 7);
    EXPECT_LT((got - expected).abs().max().item<double>(), 2e-6)
        << options.name;
    const auto state = state_of(*optimizer);
    for (const std::string kind : {"exp_avg", "exp_avg_sq"}) {
      const auto codes = state.at(kind + ".p").cpu().view(-1);
      const auto bytes = bytes_of(test[kind]);
      int others = 0;
      for (int64_t i = 0; i < size; ++i) {
        const int difference =
            codes.data_ptr<uint8_t>()[i] - bytes[static_cast<size_t>(i)];
        EXPECT_LE(std::abs(difference), 1) << kind << " " << i;
        others += difference != 0;
      }
      // At the midpoint of two codes, the result depends on float rounding.
      EXPECT_LE(others, 3) << kind;
      EXPECT_LT(
          relative_error(
              torch::tensor(test[kind + "_max"].get<std::vector<double>>()),
              state.at(kind + "_max.p").cpu()),
          1e-6)
          << kind;
    }
  }
}

/// Both optimizers learn a matrix from products with it. For the normally
/// distributed values of a block, the quantization error is 1.5% on average,
/// and up to 7% for values of a tenth of the largest. The errors are
/// independent and Adam averages over many updates, so the total change of the
/// parameters must agree within 3%, and the final loss must be about as low.
TEST(Adam8bit, StaysCloseToAdam) {
  const auto learn = [](const std::string& name, double* loss) {
    torch::manual_seed(1);
    const auto truth = torch::randn({64, 96}, on_device());
    const auto p = torch::zeros({64, 96}, on_device()).requires_grad_();
    const auto optimizer = make_optimizer(options_of(name, 0), {{"p", p}});
    for (int k = 0; k < 400; ++k) {
      const auto x = torch::randn({32, 64}, on_device());
      const auto error = (x.mm(p) - x.mm(truth)).square().mean();
      p.mutable_grad() = torch::autograd::grad({error}, {p})[0];
      optimizer->step(0.01);
    }
    *loss = (p - truth).square().mean().item<double>();
    return p.detach();
  };
  double loss = 0;
  double loss_8bit = 0;
  const auto p = learn("adam", &loss);
  const auto p_8bit = learn("adam8bit", &loss_8bit);
  const double off = relative_error(p, p_8bit);
  std::printf("off by %.4f, errors %.3g and %.3g\n", off, loss, loss_8bit);
  EXPECT_LT(off, 0.03);
  EXPECT_GT(off, 0);  // the moments are quantized
  EXPECT_LT(loss_8bit, 1.2 * loss + 1e-3);
}

/// If a second moment were rounded to 0, only eps would remain as divisor.
TEST(Adam8bit, TakesNoLargeStepAfterASmallGradient) {
  const auto p = torch::zeros({4096}, on_device());
  const auto optimizer = make_optimizer(options_of("adam8bit", 0), {{"p", p}});
  const auto gradient = torch::ones({4096}, on_device());
  gradient[17] = 1e-4;
  for (int k = 0; k < 5; ++k) {
    p.mutable_grad() = gradient;
    optimizer->step(0.01);
    gradient[17] = 0;
  }
  EXPECT_LT(p.abs().max().item<double>(), 0.06);
  EXPECT_LT(p[0].item<double>(), -0.04);
}

TEST(Adam8bit, StoresTwoBytesPerValue) {
  const auto parameters = make_parameters();
  set_gradients(parameters, 0);
  auto options = options_of("adamw8bit");
  options.unquantized = {"embedding"};
  const auto optimizer = make_optimizer(options, parameters);
  optimizer->step(0.01);
  const auto state = state_of(*optimizer);
  const auto bytes = [&](const std::string& name) {
    size_t sum = 0;
    for (const char* kind :
         {"exp_avg.", "exp_avg_sq.", "exp_avg_max.", "exp_avg_sq_max."}) {
      const auto found = state.find(kind + name);
      if (found != state.end()) sum += found->second.nbytes();
    }
    return sum;
  };
  EXPECT_EQ(bytes("blocks"), 2u * 8192 + 2u * 4 * 32);
  EXPECT_EQ(bytes("rest"), 2u * 4757 + 2u * 4 * 19);
  EXPECT_EQ(bytes("small"), 2u * 4 * 4095);
  EXPECT_EQ(bytes("embedding"), 2u * 4 * 6400);
  // Besides the state it holds the codes, whose size is constant.
  size_t held = 0;
  for (const auto& tensor : optimizer->held()) held += tensor.nbytes();
  for (const auto& [name, tensor] : state) {
    if (tensor.dim() > 0) held -= tensor.nbytes();
  }
  EXPECT_EQ(held, 2u * (65536 + 2 * 4 * 256));
  EXPECT_EQ(state.at("exp_avg.rest").scalar_type(), torch::kByte);
  EXPECT_EQ(state.at("exp_avg.embedding").scalar_type(), torch::kFloat);
  EXPECT_EQ(state.at("exp_avg_max.rest").scalar_type(), torch::kFloat);
}

/// Parameters that are not quantized must give the results of Adam for all
/// strides and chunk sizes.
TEST(Adam8bit, EqualsAdamWithoutQuantization) {
  for (const std::string name : {"adam", "adamw"}) {
    const auto parameters = make_parameters();
    const auto others = copy_of(parameters);
    auto options = options_of(name + "8bit");
    for (const auto& item : parameters) {
      options.unquantized.push_back(item.first);
    }
    const auto optimizer = make_optimizer(options, parameters);
    const auto adam = make_optimizer(options_of(name), others);
    for (uint64_t k = 0; k < 3; ++k) {
      set_gradients(parameters, k);
      set_gradients(others, k);
      optimizer->step(0.01);
      adam->step(0.01);
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_LT(relative_error(others[i].second, parameters[i].second), 1e-6)
          << name << " " << parameters[i].first;
    }
  }
}

TEST(Adam8bit, DoesNotDependOnStrides) {
  torch::manual_seed(5);
  const auto a = torch::randn({8, 40, 30}, on_device());
  const auto b = a.permute({2, 0, 1}).contiguous().permute({1, 2, 0});
  ASSERT_FALSE(b.is_contiguous());
  const auto first = make_optimizer(options_of("adam8bit"), {{"p", a}});
  const auto second = make_optimizer(options_of("adam8bit"), {{"p", b}});
  for (int k = 0; k < 3; ++k) {
    const auto gradient = torch::randn({8, 40, 30}, on_device());
    a.mutable_grad() = gradient;
    // First with the strides of the parameter, then with other strides.
    b.mutable_grad() = torch::empty_like(b).copy_(gradient);
    if (k > 0)
      b.mutable_grad() = gradient.transpose(0, 1).contiguous().transpose(0, 1);
    first->step(0.01);
    second->step(0.01);
  }
  EXPECT_LT(relative_error(a, b), 1e-6);
  EXPECT_TRUE(same(state_of(*first).at("exp_avg.p"),
                   state_of(*second).at("exp_avg.p")));
}

TEST(Adam8bit, DoesNotQuantizeOtherTypes) {
  for (const auto type : {torch::kDouble, torch::kBFloat16}) {
    const auto p = torch::zeros({5000}, on_device(type));
    const auto q = p.clone();
    const auto f = torch::zeros({5000}, on_device());
    const auto optimizer =
        make_optimizer(options_of("adam8bit"), {{"p", p}, {"f", f}});
    const auto adam = make_optimizer(options_of("adam"), {{"q", q}});
    for (int k = 0; k < 3; ++k) {
      f.mutable_grad() = torch::linspace(-1, 1, 5000, on_device());
      p.mutable_grad() = f.grad().to(type);
      q.mutable_grad() = p.grad();
      optimizer->step(0.01);
      adam->step(0.01);
    }
    const auto state = state_of(*optimizer);
    EXPECT_EQ(state.at("exp_avg.p").scalar_type(), type);
    EXPECT_EQ(state.at("exp_avg.f").scalar_type(), torch::kByte);
    EXPECT_LT(relative_error(q, p), type == torch::kDouble ? 1e-12 : 1e-2);
    EXPECT_LT(relative_error(q.to(torch::kFloat), f), 0.05);
  }
}

TEST(Adam8bit, ContinuesBitIdenticallyAfterLoading) {
  for (const std::string name : {"adam8bit", "adamw8bit"}) {
    const auto parameters = make_parameters();
    auto options = options_of(name);
    options.unquantized = {"embedding"};
    const auto optimizer = make_optimizer(options, parameters);
    for (uint64_t k = 0; k < 3; ++k) {
      set_gradients(parameters, k);
      optimizer->step(0.01);
    }
    const auto others = copy_of(parameters);
    const auto resumed = make_optimizer(options, others);
    resumed->load(copy_of(optimizer->state()));
    for (uint64_t k = 3; k < 6; ++k) {
      set_gradients(parameters, k);
      set_gradients(others, k);
      optimizer->step(0.01);
      resumed->step(0.01);
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_TRUE(same(parameters[i].second, others[i].second))
          << name << " " << parameters[i].first;
    }
    const auto state = state_of(*resumed);
    for (const auto& [key, tensor] : optimizer->state()) {
      EXPECT_TRUE(same(tensor, state.at(key))) << key;
    }
  }
}

TEST(Adam8bit, RejectsTheStateOfAnotherOptimizer) {
  const auto parameters = make_parameters();
  set_gradients(parameters, 0);
  const auto adam = make_optimizer(options_of("adamw"), parameters);
  const auto optimizer = make_optimizer(options_of("adamw8bit"), parameters);
  adam->step(0);
  optimizer->step(0);
  EXPECT_NE(error_of([&] {
              optimizer->load(adam->state());
            }).find("expected Byte [64, 128] as 'exp_avg.blocks', got Float"),
            std::string::npos);
  auto options = options_of("adamw8bit");
  options.unquantized = {"embedding"};
  const auto other = make_optimizer(options, parameters);
  EXPECT_NE(error_of([&] {
              other->load(optimizer->state());
            }).find("'exp_avg.embedding', got Byte"),
            std::string::npos);
  options.unquantized = {"embeding"};
  EXPECT_NE(error_of([&] {
              make_optimizer(options, parameters);
            }).find("names of parameters as unquantized, got 'embeding'"),
            std::string::npos);
}

/// Whichever allocation fails, no value changes and the step can be repeated.
TEST(Adam8bit, IsUnchangedByAFailedAllocation) {
  if (!testing::device().is_cpu()) {
    GTEST_SKIP() << "failures are injected on the CPU";
  }
  const auto whole = make_parameters();
  const auto parameters = make_parameters();
  const auto undisturbed = make_optimizer(options_of("adam8bit"), whole);
  const auto optimizer = make_optimizer(options_of("adam8bit"), parameters);
  int failures = 0;
  for (uint64_t k = 0; k < 2; ++k) {
    set_gradients(whole, k);
    undisturbed->step(0.01);
    set_gradients(parameters, k);
    const auto before = copy_of(parameters);
    const auto state = copy_of(optimizer->state());
    for (int64_t after = 0;; ++after) {
      const AllocationFailure failure(after);
      try {
        optimizer->step(0.01);
        break;
      } catch (const c10::Error& error) {
        ASSERT_TRUE(is_out_of_memory(error)) << error.what();
      }
      ++failures;
      for (size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_TRUE(same(parameters[i].second, before[i].second));
      }
      const auto now = optimizer->state();
      ASSERT_EQ(now.size(), state.size());
      for (size_t i = 0; i < now.size(); ++i) {
        EXPECT_TRUE(same(now[i].second, state[i].second)) << now[i].first;
      }
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_TRUE(same(parameters[i].second, whole[i].second));
    }
  }
  // The first step allocates state and codes, each step allocates buffers.
  EXPECT_GT(failures, 12);
}

/// After the first write, only scalars are allocated.
TEST(Adam8bit, BoundsTemporaryMemory) {
  const auto peak = [](int64_t values, const std::vector<std::string>& whole) {
    const auto p = torch::zeros({values}, on_device());
    p.mutable_grad() = torch::ones_like(p);
    auto options = options_of("adam8bit");
    options.unquantized = whole;
    const auto optimizer = make_optimizer(options, {{"p", p}});
    optimizer->step(0.01);
    const MemoryMeter meter(testing::device());
    optimizer->step(0.01);
    return meter.peak_increase_bytes();
  };
  constexpr int64_t kMiB = 1 << 20;
  const int64_t large = peak(6 * kMiB, {});
  EXPECT_LE(large, 32 * kMiB);
  EXPECT_EQ(peak(12 * kMiB, {}), large);
  EXPECT_LE(peak(12 * kMiB, {"p"}), 32 * kMiB);
  // A small parameter needs 17 bytes per value, and block maxima.
  EXPECT_LE(peak(8192, {}), 17 * 8192 + 2 * 4 * 32 + 4096);
}

}  // namespace
}  // namespace reprise
