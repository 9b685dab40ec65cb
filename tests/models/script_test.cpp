#include "compat/autocast.h"
#include "memory/failure.h"
#include "models/script_twins.h"
#include "temporary.h"

#include <reprise/memory/kept.h>
#include <reprise/memory/meter.h>
#include <reprise/models/script.h>
#include <reprise/plan/solver.h>
#include <reprise/recompute/checkpoint.h>
#include <reprise/recompute/execution.h>
#include <reprise/recompute/stage_costs.h>
#include <reprise/recompute/strategy.h>

#include <torch/optim/sgd.h>

#include <fstream>
#include <set>

namespace reprise {
namespace {

using testing::error_of;
using testing::NativeBlock;
using testing::same;
using testing::script_block;
using testing::script_of;
using testing::Twins;
using torch::Tensor;

std::shared_ptr<ScriptModule> wrap(const torch::jit::Module& module) {
  return std::make_shared<ScriptModule>(module, "twin");
}

/// The scripts of `twins` as a chain on the device of the tests.
Chain script_chain(const Twins& twins) {
  std::vector<Stage> stages;
  for (size_t i = 0; i < twins.scripts.size(); ++i) {
    auto module = wrap(twins.scripts[i]);
    module->to(testing::device());
    Stage stage = make_stage(twins.names[i], module);
    const bool loss = i + 1 == twins.scripts.size();
    stages.push_back(loss ? stage : stage.on_first());
  }
  return Chain(std::move(stages));
}

Tensors inputs() {
  Tensors list = testing::twin_inputs();
  for (auto& tensor : list) tensor = tensor.to(testing::device());
  return list;
}

/// A schedule halfway between the smallest memory and that without recomputation.
Schedule solved(const Chain& chain, const Tensors& batch) {
  const Solver solver(measure_stage_costs(chain, batch));
  const auto solution =
      solver.solve((solver.smallest_bytes() + solver.largest_bytes()) / 2);
  EXPECT_TRUE(solution);
  return solution->schedule;
}

/// Runs one step and returns the loss and the gradient of the input. Draws the same random
/// numbers for the same `seed`.
Tensors step(const Chain& chain, const Schedule& schedule, Tensors batch,
             uint64_t seed) {
  batch[0] = batch[0].detach().requires_grad_();
  torch::manual_seed(seed);
  Execution execution(chain, schedule);
  const Tensors outputs = execution.forward(batch);
  Tensors result = {outputs[0]};
  result.push_back(execution.backward({torch::ones_like(outputs[0])})[0]);
  return result;
}

/// Compares lists of tensors bit by bit on the CPU.
void expect_equal(const std::vector<Tensor>& a, const std::vector<Tensor>& b,
                  const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  ASSERT_FALSE(a.empty()) << what;
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(same(a[i], b[i])) << what << " " << i;
  }
}

std::vector<Tensor> gradients(const Chain& chain) {
  std::vector<Tensor> list;
  for (const auto& parameter : chain.parameters()) {
    EXPECT_TRUE(parameter.grad().defined());
    list.push_back(parameter.grad());
  }
  return list;
}

TEST(Script, HasTheTensorsOfTheScriptUnderTheirNames) {
  NativeBlock block;
  const torch::jit::Module script = script_block(*block);
  const auto module = wrap(script);
  std::set<std::string> names;
  for (const auto& item : module->named_parameters()) names.insert(item.key());
  EXPECT_EQ(names, (std::set<std::string>{"conv.weight", "conv.bias",
                                          "bn.weight", "bn.bias"}));
  const auto own = module->named_parameters();
  for (const auto& item : script.named_parameters()) {
    EXPECT_TRUE(own[item.name].is_same(item.value)) << item.name;
  }
  const auto buffers = module->named_buffers();
  EXPECT_EQ(buffers.size(), 3u);
  for (const auto& item : script.named_buffers()) {
    EXPECT_TRUE(buffers[item.name].is_same(item.value)) << item.name;
  }
}

TEST(Script, TrainsAsTheNativeModules) {
  for (const char* strategy : {"none", "all", "sqrt", "solved"}) {
    torch::manual_seed(3);
    Twins twins;
    const Chain script = script_chain(twins);
    for (const auto& module : twins.natives) module->to(testing::device());
    const Tensors batch = inputs();
    const std::string name = strategy;
    const Schedule schedule = name == "solved"
                                  ? solved(script, batch)
                                  : make_schedule(name, script.size());
    if (name == "solved") {
      EXPECT_NE(schedule.to_text(),
                make_schedule("none", script.size()).to_text());
    }
    const Schedule none = make_schedule("none", script.size());
    const auto sgd = torch::optim::SGDOptions(0.1).momentum(0.9);
    torch::optim::SGD native_update(twins.native.parameters(), sgd);
    torch::optim::SGD script_update(script.parameters(), sgd);
    // TorchScript's profiling executor would change its code in the first three.
    for (uint64_t i = 0; i < 5; ++i) {
      const std::string what = name + " " + std::to_string(i);
      expect_equal(step(script, schedule, batch, i),
                   step(twins.native, none, batch, i), what + " outputs");
      expect_equal(gradients(script), gradients(twins.native), what + " .grad");
      expect_equal(script.buffers(), twins.native.buffers(), what + " buffers");
      native_update.step();
      script_update.step();
      expect_equal(script.parameters(), twins.native.parameters(),
                   what + " parameters");
      native_update.zero_grad();
      script_update.zero_grad();
    }
    for (const Tensor& buffer : script.buffers()) {
      if (buffer.dim() == 0) {
        EXPECT_EQ(buffer.item<int64_t>(), 5);
      }
    }
  }
}

TEST(Script, KeepsTheSameTensorsInEveryRun) {
  torch::manual_seed(1);
  NativeBlock block;
  const auto script = wrap(script_block(*block));
  script->to(testing::device());
  block->to(testing::device());
  const Tensor x = inputs()[0].requires_grad_();
  const auto kept = [&](const std::function<Tensor()>& run,
                        const torch::nn::Module& module) {
    auto state = module.parameters();
    for (const auto& buffer : module.buffers()) state.push_back(buffer);
    const KeptMeter meter(state);
    Tensor y;
    {
      const KeptMeter::Scope scope(meter, 0);
      y = run();
    }
    const int64_t bytes = meter.live_bytes();
    y.sum().backward();
    return bytes;
  };
  const int64_t expected = kept([&] { return block->forward(x); }, *block);
  EXPECT_GT(expected, 0);
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(kept([&] { return script->forward({x})[0]; }, *script), expected)
        << i;
  }
}

TEST(Script, IsRecomputedByCheckpoint) {
  torch::manual_seed(1);
  NativeBlock block;
  const auto script = wrap(script_block(*block));
  script->to(testing::device());
  block->to(testing::device());
  for (int i = 0; i < 4; ++i) {
    const Tensor x = inputs()[0];
    const auto gradient = [&](const std::function<Tensor(const Tensor&)>& f) {
      const Tensor leaf = x.detach().clone().requires_grad_();
      torch::manual_seed(7);
      f(leaf).square().sum().backward();
      return leaf.grad();
    };
    CheckpointOptions options;
    options.modules = {script};
    const Tensor recomputed = gradient([&](const Tensor& leaf) {
      return checkpoint_list(
          [&](const Tensors& list) { return script->forward(list); }, {leaf},
          options)[0];
    });
    EXPECT_TRUE(same(recomputed, gradient([&](const Tensor& leaf) {
                       return block->forward(leaf);
                     })));
    expect_equal(script->buffers(), block->buffers(), "buffers");
  }
}

TEST(Script, FollowsAutocastAsTheNativeModules) {
  torch::manual_seed(2);
  Twins twins;
  const Chain script = script_chain(twins);
  for (const auto& module : twins.natives) module->to(testing::device());
  compat::AutocastState bf16 = compat::AutocastState::current();
  bf16.cpu_enabled = bf16.cuda_enabled = true;
  bf16.cpu_dtype = bf16.cuda_dtype = torch::kBFloat16;
  bf16.cache_enabled = false;
  const Tensors batch = inputs();
  const Schedule all = make_schedule("all", script.size());
  for (uint64_t i = 0; i < 3; ++i) {
    const compat::AutocastGuard autocast(bf16);
    EXPECT_EQ(script[0]({batch[0]})[0].scalar_type(), torch::kFloat);
    twins.native[0]({batch[0]});
    expect_equal(step(script, all, batch, i), step(twins.native, all, batch, i),
                 "outputs");
  }
  expect_equal(gradients(script), gradients(twins.native), ".grad");
  expect_equal(script.buffers(), twins.native.buffers(), "buffers");
}

TEST(Script, MovesToAnotherType) {
  torch::manual_seed(1);
  NativeBlock block;
  const torch::jit::Module script = script_block(*block);
  const auto module = wrap(script);
  module->to(torch::kDouble);
  block->to(torch::kDouble);
  const auto own = module->named_parameters();
  for (const auto& item : script.named_parameters()) {
    EXPECT_EQ(item.value.scalar_type(), torch::kDouble);
    EXPECT_EQ(item.value.data_ptr(), own[item.name].data_ptr());
  }
  EXPECT_EQ(module->named_buffers()["bn.num_batches_tracked"].scalar_type(),
            block->bn->num_batches_tracked.scalar_type());
  const Tensor x = testing::twin_inputs()[0].to(torch::kDouble);
  torch::manual_seed(5);
  const Tensor y = module->forward({x})[0];
  torch::manual_seed(5);
  EXPECT_TRUE(same(y, block->forward(x)));
  y.sum().backward();
  EXPECT_EQ(own["conv.weight"].grad().scalar_type(), torch::kDouble);
}

TEST(Script, SwitchesModes) {
  NativeBlock block;
  const torch::jit::Module script = script_block(*block);
  const auto module = wrap(script);
  const Tensor x = testing::twin_inputs()[0];
  module->eval();
  block->eval();
  EXPECT_FALSE(script.is_training());
  EXPECT_TRUE(same(module->forward({x})[0], block->forward(x)));
  EXPECT_EQ(module->named_buffers()["bn.num_batches_tracked"].item<int>(), 0);
  module->train();
  EXPECT_TRUE(script.is_training());
  module->forward({x});
  EXPECT_EQ(module->named_buffers()["bn.num_batches_tracked"].item<int>(), 1);
}

TEST(Script, KeepsFrozenParametersThroughAFile) {
  NativeBlock block;
  torch::jit::Module script = script_block(*block);
  script.attr("bn").toModule().attr("weight").toTensor().set_requires_grad(
      false);
  const testing::TemporaryDirectory folder;
  script.save(folder / "block.pt");
  const auto module = load_script_module(folder / "block.pt");
  const auto parameters = module->named_parameters();
  EXPECT_EQ(parameters.size(), 4u);
  EXPECT_FALSE(parameters["bn.weight"].requires_grad());
  EXPECT_TRUE(parameters["conv.weight"].requires_grad());
  module->forward({testing::twin_inputs()[0]})[0].sum().backward();
  EXPECT_FALSE(parameters["bn.weight"].grad().defined());
  EXPECT_TRUE(parameters["conv.weight"].grad().defined());
}

TEST(Script, ListsASharedTensorOnceAlsoAfterAFile) {
  torch::jit::Module script = testing::empty_script("tied");
  const Tensor weight = torch::randn({3, 3}).requires_grad_();
  for (const char* name : {"first", "second"}) {
    torch::jit::Module layer = testing::empty_script(name);
    layer.register_parameter("weight", weight, false);
    script.register_module(name, layer);
  }
  script.define(R"(
def forward(self, x: Tensor) -> Tensor:
    return torch.matmul(torch.matmul(x, self.first.weight), self.second.weight)
)");
  const testing::TemporaryDirectory folder;
  script.save(folder / "tied.pt");
  for (const auto& module :
       {wrap(script), load_script_module(folder / "tied.pt")}) {
    ASSERT_EQ(module->parameters().size(), 1u);
    module->to(torch::kDouble);
    const Tensor own = module->named_parameters()["first.weight"];
    const Tensor x = torch::randn({2, 3}, torch::kDouble);
    module->forward({x})[0].sum().backward();
    const Tensor leaf = own.detach().clone().requires_grad_();
    x.matmul(leaf).matmul(leaf).sum().backward();
    EXPECT_TRUE(same(own.grad(), leaf.grad()));
  }
}

TEST(Script, TakesAndReturnsLists) {
  const Tensor a = torch::randn({2}), b = torch::randn({2});
  const auto tuple = wrap(script_of(R"(
def forward(self, a: Tensor, b: Tensor):
    return a + b, a - b
)"));
  EXPECT_EQ(tuple->required_inputs(), 2);
  const Tensors outputs = tuple->forward({a, b});
  ASSERT_EQ(outputs.size(), 2u);
  EXPECT_TRUE(same(outputs[0], a + b));
  EXPECT_TRUE(same(outputs[1], a - b));

  const auto list = wrap(script_of(R"(
def forward(self, a: Tensor, b: Optional[Tensor] = None) -> List[Tensor]:
    if b is None:
        return [a]
    return [a, b, a * b]
)"));
  EXPECT_EQ(list->required_inputs(), 1);
  EXPECT_EQ(list->most_inputs(), 2);
  EXPECT_EQ(list->forward({a}).size(), 1u);
  EXPECT_TRUE(same(list->forward({a, b}).at(2), a * b));
}

/// Multiplies by a buffer, and assigns a new value to it afterwards.
torch::jit::Module assigning_script() {
  torch::jit::Module script = testing::empty_script("assigning");
  script.register_buffer("scale", torch::full({3}, 2.0));
  script.define(R"(
def forward(self, x: Tensor) -> Tensor:
    y = x * self.scale
    self.scale = self.scale * 0.5
    return y
)");
  return script;
}

TEST(Script, TakesBackBuffersThatTheCodeAssigns) {
  const torch::jit::Module script = assigning_script();
  const auto module = wrap(script);
  const Tensor buffer = module->buffers().at(0);
  const Chain chain(
      {make_stage("first", module),
       make_stage("twice", [](const Tensor& x) { return x * 2; })});
  for (const char* strategy : {"none", "all"}) {
    const double before = buffer[0].item<double>();
    const Tensor x = torch::ones(3).requires_grad_();
    const Schedule schedule = make_schedule(strategy, 2);
    chain.forward(x, schedule).sum().backward();
    // The gradient is that of the value before the assignment.
    EXPECT_TRUE(same(x.grad(), torch::full({3}, 2 * before)));
    EXPECT_EQ(buffer[0].item<double>(), before / 2);
    EXPECT_TRUE(script.attr("scale").toTensor().is_same(buffer));
  }
}

TEST(Script, RunsAnotherScriptInEvaluation) {
  const auto scale = [](double factor, int64_t size) {
    torch::jit::Module script = testing::empty_script("scale");
    script.register_parameter("weight", torch::randn({size}).requires_grad_(),
                              false);
    script.define("def forward(self, x: Tensor) -> Tensor:\n    return x * " +
                  std::to_string(factor) + " * self.weight\n");
    return script;
  };
  ScriptModule module(scale(2, 3), scale(10, 3), "modes");
  ASSERT_EQ(module.parameters().size(), 1u);
  module.to(torch::kDouble);
  const Tensor x = torch::randn({3}, torch::kDouble);
  const Tensor weight = module.parameters()[0];
  EXPECT_TRUE(same(module.forward({x})[0], x * 2 * weight));
  module.eval();
  EXPECT_TRUE(same(module.forward({x})[0], x * 10 * weight));
  EXPECT_NE(error_of([&] {
              ScriptModule(scale(2, 3), scale(2, 4), "modes");
            }).find("[script 'modes'] expected 'weight' as Float[3]"),
            std::string::npos);
}

TEST(Script, KeepsTheTypeOfAFailedAllocation) {
  NativeBlock block;
  const auto module = wrap(script_block(*block));
  const Tensor x = testing::twin_inputs()[0];
  module->forward({x});
  int64_t allocations = 0;
  {
    const AllocationFailure none(1 << 20);
    module->forward({x});
    allocations = none.counted();
  }
  ASSERT_GT(allocations, 3);
  for (int64_t i = 0; i < allocations; ++i) {
    const AllocationFailure failure(i);
    try {
      module->forward({x});
      ADD_FAILURE() << "allocation " << i << " did not fail";
    } catch (const c10::Error& error) {
      EXPECT_TRUE(is_out_of_memory(error)) << error.what();
      EXPECT_NE(std::string(error.what()).find("in script 'twin'"),
                std::string::npos);
    }
  }
}

TEST(Script, RejectsWrongCalls) {
  const auto two = wrap(script_of(
      "def forward(self, a: Tensor, b: Tensor):\n    return a + b\n"));
  const Tensor x = torch::ones(2);
  EXPECT_NE(error_of([&] { two->forward({x}); })
                .find("[script 'twin'] expected 2 tensors, as its forward() "
                      "takes, got 1"),
            std::string::npos);
  const auto number =
      wrap(script_of("def forward(self, a: Tensor):\n    return 3\n"));
  EXPECT_NE(error_of([&] {
              number->forward({x});
            }).find("or a tuple or list of tensors, got int"),
            std::string::npos);
  const auto mixed =
      wrap(script_of("def forward(self, a: Tensor):\n    return a, 3\n"));
  EXPECT_NE(
      error_of([&] { mixed->forward({x}); }).find("got Tuple[Tensor, int]"),
      std::string::npos);
}

TEST(Script, RejectsScriptsThatCannotBeTrained) {
  EXPECT_NE(error_of([&] {
              wrap(testing::empty_script("nothing"));
            }).find("expected a module with a method forward()"),
            std::string::npos);
  torch::jit::Module assigns = testing::empty_script("assigns");
  assigns.register_parameter("weight", torch::ones(2), false);
  assigns.define(R"(
def forward(self, x: Tensor):
    self.weight = x
    return x
)");
  EXPECT_NE(error_of([&] { wrap(assigns); }).find("assigns to 'weight'"),
            std::string::npos);
  const testing::TemporaryDirectory folder;
  EXPECT_NE(error_of([&] {
              load_script_module(folder / "none.pt");
            }).find("there is no file " + folder / "none.pt"),
            std::string::npos);
  std::ofstream(folder / "text.pt") << "no script";
  EXPECT_NE(error_of([&] {
              load_script_module(folder / "text.pt");
            }).find("text.pt: expected a file written by torch.jit.save()"),
            std::string::npos);
}

}  // namespace
}  // namespace reprise
