// Trainings of scripts, compared with those of the same native modules.
#include "memory/failure.h"
#include "models/script_directory.h"
#include "train/runs.h"

#include <reprise/train/run.h>

#include <map>

namespace reprise {
namespace {

using testing::same;
using testing::ScriptDirectory;
using testing::Twins;
using torch::Tensor;

/// Images of 4 channels in classes that can be told apart.
class Images : public Dataset {
 public:
  int64_t size() const override { return 22; }
  Batch get(const std::vector<int64_t>& indices) const override {
    Batch batch;
    std::vector<Tensor> images, targets;
    for (const int64_t index : indices) {
      images.push_back(torch::full({testing::kTwinChannels, 8, 8},
                                   static_cast<double>(index % 5) / 5));
      images.back()[0][0][0] = static_cast<double>(index);
      targets.push_back(torch::tensor(index % 5, torch::kLong));
    }
    batch.tensors = {torch::stack(images), torch::stack(targets)};
    batch.samples = batch.count = static_cast<int64_t>(indices.size());
    return batch;
  }
  std::string description() const override { return "images"; }
};

TrainInputs inputs_of(Model model) {
  const auto data = std::make_shared<Images>();
  return {std::move(model), {"images", data, data}};
}

Model native_model(const Twins& twins) {
  return Model{.name = "twin",
               .root = twins.root,
               .chain = twins.native,
               .metrics = {"accuracy"}};
}

TrainOptions options_of() {
  TrainOptions options = testing::small();
  options.device = "cpu";  // whose results are equal in every bit
  options.rate.base = 0.05;
  options.epochs = 3;
  return options;
}

/// Trains, and returns the parameters and buffers by name.
std::map<std::string, Tensor> trained(Model model, TrainOptions options,
                                      TrainResult* result = nullptr) {
  options.resolve();
  torch::manual_seed(9);
  Trainer trainer(inputs_of(std::move(model)), options);
  TrainResult end = trainer.run();
  std::map<std::string, Tensor> tensors;
  const auto& root = *trainer.model().root;
  for (const auto& item : root.named_parameters()) {
    tensors[item.key()] = item.value().detach();
  }
  for (const auto& item : root.named_buffers()) {
    tensors[item.key()] = item.value();
  }
  if (result != nullptr) *result = std::move(end);
  return tensors;
}

void expect_equal(const std::map<std::string, Tensor>& a,
                  const std::map<std::string, Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, tensor] : a) {
    ASSERT_TRUE(b.contains(name)) << name;
    EXPECT_TRUE(same(tensor, b.at(name))) << name;
  }
}

TEST(ScriptTraining, TrainsAsTheNativeModel) {
  torch::manual_seed(2);
  Twins twins;
  const ScriptDirectory directory(twins);
  TrainOptions options = options_of();
  TrainResult script, native;
  options.evaluate = true;
  options.recompute = "sqrt";
  const auto a = trained(directory.load(), options, &script);
  options.recompute = "none";
  expect_equal(a, trained(native_model(twins), options, &native));
  ASSERT_TRUE(native.summary.eval_loss.has_value());
  EXPECT_EQ(script.summary.loss, native.summary.loss);
  EXPECT_EQ(script.summary.eval_loss, native.summary.eval_loss);
  EXPECT_EQ(script.summary.eval_metrics, native.summary.eval_metrics);
}

TEST(ScriptTraining, TrainsWithinABudget) {
  torch::manual_seed(2);
  Twins twins(6);
  const ScriptDirectory directory(twins);
  TrainOptions options = options_of();
  options.batch = 8;
  options.accumulate = 1;
  TrainResult whole;
  options.recompute = "none";
  const auto expected = trained(native_model(twins), options, &whole);
  options.recompute.clear();
  options.memory_limit = whole.summary.peak_bytes * 3 / 4;
  TrainResult planned;
  expect_equal(trained(directory.load(), options, &planned), expected);
  ASSERT_TRUE(planned.summary.predicted.has_value());
  EXPECT_GT(whole.summary.peak_bytes, options.memory_limit);
  EXPECT_LE(planned.summary.peak_bytes, options.memory_limit);
}

TEST(ScriptTraining, RepeatsAWindowAfterAFailedAllocation) {
  torch::manual_seed(2);
  Twins twins(2);
  const ScriptDirectory directory(twins);
  TrainOptions options = options_of();
  options.recompute = "all";
  const auto expected = trained(directory.load(), options);
  options.resolve();
  torch::manual_seed(9);
  Trainer trainer(inputs_of(directory.load()), options);
  TrainResult result;
  {
    const AllocationFailure failure(400);
    result = trainer.run();
    EXPECT_TRUE(failure.happened());
  }
  for (const auto& item : trainer.model().root->named_parameters()) {
    EXPECT_TRUE(same(item.value(), expected.at(item.key()))) << item.key();
  }
}

TEST(ScriptTraining, ResumesAsIfItHadNotStopped) {
  torch::manual_seed(2);
  Twins twins(2);
  const ScriptDirectory directory(twins);
  const testing::TemporaryDirectory base;
  const auto inputs = [&](const TrainOptions& options) {
    torch::manual_seed(options.seed);
    return inputs_of(directory.load());
  };
  TrainOptions options = options_of();
  options.recompute = "all";
  RunOptions whole, part, rest;
  whole.out = base / "whole";
  run_training(options, inputs, whole);
  part.out = base / "part";
  part.stop = [left = 5]() mutable { return left-- == 0; };
  EXPECT_TRUE(run_training(options, inputs, part).training.stopped);
  rest.resume = part.out;
  run_training(options, inputs, rest);
  const auto state = [](const std::string& path) {
    return detail::newest_state(RunDirectory::open(path),
                                [](const auto&) { FAIL(); })
        ->tensors;
  };
  const NamedTensors a = state(part.out), b = state(whole.out);
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].first, b[i].first);
    EXPECT_TRUE(same(a[i].second, b[i].second)) << a[i].first;
  }
}

TEST(ScriptTraining, TrainsInHalfPrecisionAsTheNativeModel) {
  torch::manual_seed(2);
  Twins twins(2);
  const ScriptDirectory directory(twins);
  TrainOptions options = options_of();
  options.precision = Precision::kBf16;
  options.recompute = "all";
  const auto a = trained(directory.load(), options);
  expect_equal(a, trained(native_model(twins), options));
}

}  // namespace
}  // namespace reprise
