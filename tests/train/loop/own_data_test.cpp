#include "train/points.h"

#include <reprise/data/sequences.h>
#include <reprise/data/torch_data.h>
#include <reprise/recompute/strategy.h>
#include <reprise/train/inputs.h>

#include <torch/data/datasets/map.h>
#include <torch/data/datasets/tensor.h>
#include <torch/data/transforms/lambda.h>

#include <atomic>
#include <limits>
#include <random>

/// Trainings on streams, orders, torch::data and sequences of different lengths.
namespace reprise {
namespace {

using testing::error_of;
using testing::expect_same;
using testing::in_order;
using testing::kPoints;
using testing::point_inputs;
using testing::point_options;
using testing::Points;
using testing::PointStream;
using testing::relative_error;
using testing::train_points;

/// The truth is the training on the same samples as a dataset, which own_model_test.cpp
/// compares with a plain loop. The stream repeats its 24 points: two epochs.
TEST(OwnData, StreamsTrainAsTheirSamplesInOrder) {
  const auto expected = train_points(in_order(std::make_shared<Points>()));
  for (const int workers : {0, 2}) {
    TrainOptions options = point_options();
    options.workers = workers;
    const auto found = train_points(std::make_shared<PointStream>(), options);
    expect_same(expected, found, "stream");
    EXPECT_EQ(found.result.summary.data_samples, 0);
  }
}

TEST(OwnData, StreamsResumeAtEveryMicroBatch) {
  const auto data = std::make_shared<PointStream>();
  const auto whole = train_points(data);
  for (int stop = 1; stop < 18; stop += 2) {
    expect_same(whole, train_points(data, point_options(), {stop}),
                "stopped after " + std::to_string(stop));
  }
  expect_same(whole, train_points(data, point_options(), {4, 0, 5}), "thrice");
}

/// Fails one allocation after the other. A window that ran out of memory is read again.
TEST(OwnData, StreamsRepeatWindowsThatRanOutOfMemory) {
  const auto data = std::make_shared<PointStream>();
  const auto whole = train_points(data, point_options(2));
  const testing::TemporaryDirectory folder;
  int64_t allocations = 0;
  int happened = 0;
  for (int64_t after = -1; after < allocations; after += 13) {
    TrainOptions options = point_options(2);
    options.resolve();
    auto directory = RunDirectory::create(
        folder.path() + "/" + std::to_string(after + 1), to_json(options));
    Trainer trainer(point_inputs(data), options);
    TrainRun run;
    run.directory = &directory;
    testing::Ended ended;
    {
      AllocationFailure failure(after < 0 ? std::numeric_limits<int64_t>::max()
                                          : after);
      ended.result = trainer.run(run);
      if (after < 0) allocations = failure.counted();
      happened += failure.happened() ? 1 : 0;
    }
    ended.tensors =
        detail::newest_state(directory, [](const auto&) { FAIL(); })->tensors;
    ended.metrics = read_text(directory.metrics_path());
    expect_same(whole, ended, "allocation " + std::to_string(after));
  }
  // A step on CUDA allocates less on the host.
  EXPECT_GT(happened, testing::device().is_cpu() ? 5 : 3);
}

/// Plans micro-batches of 8, then of 3, then of 2.
class Shrinking final : public BudgetPlanner {
 public:
  Plan decide() override { return plan(8); }
  std::optional<Plan> tighten(const Plan& present, int64_t) override {
    if (present.micro_batch == 2) return std::nullopt;
    return plan(present.micro_batch == 8 ? 3 : 2);
  }

 private:
  static Plan plan(int64_t size) {
    return {.micro_batch = size,
            .accumulate = (8 + size - 1) / size,
            .schedule = make_schedule("none", 2),
            .peak_bytes = 1,
            .step_ms = 1,
            .graph = false};
  }
};

TEST(OwnData, StreamsKeepTheirSamplesWhenTheMicroBatchChanges) {
  const testing::TemporaryDirectory folder;
  const auto expected = train_points(
      folder / "fixed",
      [] { return point_inputs(in_order(std::make_shared<Points>()), 0); },
      point_options());
  TrainOptions options = point_options();
  options.batch = 0;
  options.memory_limit = 1;  // exceeded in every window
  options.resolve();
  Trainer trainer(point_inputs(std::make_shared<PointStream>(), /*dropout=*/0),
                  options, {.planner = std::make_unique<Shrinking>()});
  EXPECT_EQ(trainer.run().summary.replans, 2);
  const auto parameters = trainer.model().root->named_parameters();
  int compared = 0;
  for (const auto& [name, tensor] : expected.tensors) {
    if (!name.starts_with("parameter.")) continue;
    const auto& found = parameters[name.substr(10)];
    EXPECT_LT(relative_error(tensor, found.detach().cpu()), 1e-5) << name;
    ++compared;
  }
  EXPECT_EQ(compared, 4);
}

/// Points 0, 5, 10, … have no count. With micro-batches of one sample they are skipped, in
/// the middle of a window and at its end; with one of 8 they have no effect either.
TEST(OwnData, MicroBatchesWithoutACountAreSkipped) {
  const testing::TemporaryDirectory folder;
  for (const int64_t first : {0, 3}) {
    const auto inputs = [first] {
      return point_inputs(with_order(std::make_shared<Points>(),
                                     [first](int64_t, uint64_t) {
                                       std::vector<int64_t> order;
                                       for (int64_t i = 0; i < kPoints; ++i) {
                                         order.push_back((first + i) % kPoints);
                                       }
                                       return order;
                                     }),
                          /*dropout=*/0);
    };
    const auto path = [&](const std::string& name) {
      return folder / (name + std::to_string(first));
    };
    TrainOptions options = point_options();
    options.batch = 8;
    const auto whole = train_points(path("whole"), inputs, options);
    options.batch = 1;
    const auto single = train_points(path("single"), inputs, options);
    EXPECT_EQ(single.result.summary.steps, 6);
    for (size_t i = 0; i < whole.tensors.size(); ++i) {
      const auto& [name, tensor] = whole.tensors[i];
      if (!name.starts_with("parameter.")) continue;
      EXPECT_LT(relative_error(tensor, single.tensors[i].second), 1e-5) << name;
    }
    for (const int stop : {1, 7, 8, 15, 16, 17}) {
      const std::string name = "stop" + std::to_string(stop);
      expect_same(single, train_points(path(name), inputs, options, {stop}),
                  name);
    }
  }
}

/// A dataset that has the samples in the order of training already.
class Reordered final : public Points {
 public:
  explicit Reordered(const std::vector<int64_t>& order) : order_(order) {}
  int64_t size() const override { return static_cast<int64_t>(order_.size()); }
  int64_t count(int64_t i) const override { return Points::count(at(i)); }
  Batch get(const std::vector<int64_t>& indices) const override {
    std::vector<int64_t> points;
    for (const int64_t i : indices) points.push_back(at(i));
    return Points::get(points);
  }

 private:
  int64_t at(int64_t i) const { return order_[static_cast<size_t>(i)]; }
  std::vector<int64_t> order_;
};

TEST(OwnData, OrdersDecideTheSamplesOfAnEpoch) {
  const auto drawn = [](int64_t epoch, uint64_t seed) {
    std::mt19937_64 random(100 * seed + static_cast<uint64_t>(epoch));
    std::vector<int64_t> order(20);  // with replacement
    for (int64_t& i : order) i = static_cast<int64_t>(random() % kPoints);
    return order;
  };
  TrainOptions options = point_options(0);
  options.epochs = 2;
  const auto data = with_order(std::make_shared<Points>(), drawn);
  const auto found = train_points(data, options);
  EXPECT_EQ(found.result.summary.steps, 6);  // 8 + 8 + 4 samples per epoch
  std::vector<int64_t> both = drawn(0, options.seed);
  const auto second = drawn(1, options.seed);
  expect_same(found, train_points(data, options, {10}), "resumed");
  options.epochs = 1;
  const auto first =
      train_points(in_order(std::make_shared<Reordered>(both)), options);
  const auto one =
      train_points(with_order(std::make_shared<Points>(), drawn), options);
  expect_same(first, one, "first epoch");
  EXPECT_NE(both, second);
}

TEST(OwnData, TorchDatasetsTrainAsTheirTensors) {
  namespace td = torch::data;
  class All final : public Points {
   public:
    int64_t count(int64_t) const override { return 3; }
    Batch get(const std::vector<int64_t>& indices) const override {
      Batch batch = Points::get(indices);
      batch.tensors[1].fill_(1);
      batch.count = 3 * batch.samples;
      return batch;
    }
  };
  const auto expected = train_points(std::make_shared<All>());
  const Points points;
  // The target as a fourth column, cut off by a transform.
  const auto together =
      torch::cat({points.x, points.y.unsqueeze(-1)}, /*dim=*/-1);
  using In = td::TensorExample;
  const auto dataset = td::datasets::TensorDataset(together).map(
      td::transforms::Lambda<In, td::Example<>>([](In row) {
        return td::Example<>(row.data.narrow(-1, 0, testing::kPointWidth),
                             row.data.select(-1, testing::kPointWidth));
      }));
  const auto data = from_torch(
      dataset,
      {.collate =
           [](std::vector<td::Example<>> rows) {
             std::vector<torch::Tensor> x, y;
             for (const auto& row : rows) {
               x.push_back(row.data);
               y.push_back(row.target);
             }
             const auto values = torch::stack(y);
             return Batch{.tensors = {torch::stack(x), torch::ones_like(values),
                                      values}};
           },
       .count = [](int64_t) { return 3; }});
  expect_same(expected, train_points(data), "torch::data");
}

/// Rows as long as the longest of the batch: shapes differ from one micro-batch to the
/// next, and plans are measured with the longest rows.
class Ragged final : public Dataset {
 public:
  int64_t size() const override { return 16; }
  static int64_t length(int64_t index) { return 1 + index * 7 % 16; }
  int64_t count(int64_t index) const override { return length(index); }
  Batch get(const std::vector<int64_t>& indices) const override {
    std::vector<torch::Tensor> x, y;
    for (const int64_t index : indices) {
      auto generator =
          at::detail::createCPUGenerator(static_cast<uint64_t>(index));
      x.push_back(
          torch::randn({length(index), testing::kPointWidth}, generator));
      y.push_back(x.back().sum(-1));
    }
    const auto padded = pad_batch(x, {.length = fixed});
    Batch batch{.tensors = {padded.values, padded.mask.to(torch::kFloat),
                            pad_batch(y, {.length = fixed}).values},
                .samples = static_cast<int64_t>(indices.size())};
    batch.count = padded.lengths.sum().item<int64_t>();
    return batch;
  }
  Batch largest(int64_t samples) const override {
    ++asked;
    return get(std::vector<int64_t>(static_cast<size_t>(samples), 9));
  }
  std::string description() const override { return "ragged"; }

  int64_t fixed = 0;
  mutable std::atomic<int64_t> asked = 0;
};

TEST(OwnData, SequencesOfDifferentLengthsTrainAsPaddedToTheLongest) {
  EXPECT_EQ(Ragged::length(9), 16);
  TrainOptions options = point_options(8);
  const auto inputs = [](int64_t fixed) {
    const auto data = std::make_shared<Ragged>();
    data->fixed = fixed;
    TrainInputs made = point_inputs(data);
    // Without dropout, whose numbers depend on the shape.
    made.model.chain = Chain({make_stage(
        "sum",
        [root = made.model.root](const torch::Tensor& x,
                                 const torch::Tensor& mask,
                                 const torch::Tensor& y) {
          const auto p = root->named_parameters();
          const auto h =
              torch::tanh(torch::linear(x, p["first.weight"], p["first.bias"]));
          const auto out = torch::linear(h, p["last.weight"], p["last.bias"]);
          return Tensors{((out.squeeze(-1) - y).pow(2) * mask).sum()};
        },
        {made.model.root})});
    return made;
  };
  const testing::TemporaryDirectory folder;
  const auto ragged = train_points(
      folder / "ragged", [&] { return inputs(0); }, options);
  const auto fixed = train_points(
      folder / "fixed", [&] { return inputs(16); }, options);
  for (size_t i = 0; i < ragged.tensors.size(); ++i) {
    const auto& [name, tensor] = ragged.tensors[i];
    if (!name.starts_with("parameter.")) continue;
    EXPECT_LT(relative_error(fixed.tensors[i].second, tensor), 1e-5) << name;
  }
  options.batch = 0;
  options.memory_limit = testing::enough_memory();
  options.resolve();
  TrainInputs planned = inputs(0);
  const auto data = std::dynamic_pointer_cast<const Ragged>(planned.data.train);
  Trainer trainer(std::move(planned), options);
  EXPECT_GT(data->asked, 0);
  EXPECT_EQ(trainer.run().summary.replans, 0);
}

/// A dataset with one fault.
struct Faulty final : Points {
  std::function<void(Batch&, bool first)> fault;
  mutable std::atomic<bool> first = true;
  int64_t of_size = kPoints;
  bool counts = true;
  int64_t size() const override { return of_size; }
  int64_t count(int64_t index) const override {
    return counts ? Points::count(index) : 0;
  }
  Batch get(const std::vector<int64_t>& indices) const override {
    Batch batch = Points::get(indices);
    if (!counts) batch.count = 0;
    if (fault) fault(batch, first.exchange(false));
    return batch;
  }
};

TEST(OwnData, ErrorsSayWhatToDo) {
  const auto expect = [](const std::function<void(Faulty&)>& change,
                         const std::string& part) {
    const auto data = std::make_shared<Faulty>();
    change(*data);
    const auto text = error_of([&] {
      TrainOptions options = point_options();
      options.resolve();
      TrainInputs inputs = point_inputs(data);
      inputs.check_model = false;  // which would read the first batch
      Trainer(std::move(inputs), options).run();
    });
    EXPECT_NE(text.find(part), std::string::npos) << part << ": " << text;
  };
  using Fault = std::function<void(Batch&, bool)>;
  const auto with = [](const Fault& fault) {
    return [fault](Faulty& data) { data.fault = fault; };
  };
  expect([](Faulty& data) { data.of_size = 0; },
         "expected training data with samples, got a size of 0");
  expect([](Faulty& data) { data.counts = false; },
         "expected a count above 0 in every window, got 0 for the 8 samples "
         "of update 1");
  expect(with([](Batch& batch, bool) { batch.tensors[1] = torch::Tensor(); }),
         "tensor 1 of 3 is undefined");
  expect(with([](Batch& batch, bool) { batch.samples = 1; }),
         "of the 3 samples asked for, got 1");
  expect(with([](Batch& batch, bool) { ++batch.count; }),
         "let Batch::count and Dataset::count() count the same");
  expect(with([](Batch& batch, bool first) {
           if (!first) batch.tensors.push_back(batch.tensors[0]);
         }),
         "expected 3 tensors in every batch, as in the first one, got 4");
  expect(with([](Batch& batch, bool first) {
           if (!first) batch.tensors[0] = batch.tensors[0].to(torch::kDouble);
         }),
         "expected tensor 0 to be Float on cpu in every batch");
}

TEST(OwnData, StreamsNeedSteps) {
  const auto error = [](const std::function<void(TrainInputs&)>& change,
                        TrainOptions options) {
    return error_of([&] {
      TrainInputs inputs = point_inputs(std::make_shared<PointStream>());
      change(inputs);
      options.resolve();
      Trainer trainer(std::move(inputs), options);
    });
  };
  TrainOptions epochs = point_options(0);
  epochs.epochs = 2;
  auto text = error([](TrainInputs&) {}, epochs);
  EXPECT_NE(text.find("[--steps] the training data is a stream, which has no "
                      "epochs; give the number of updates"),
            std::string::npos)
      << text;
  text =
      error([](TrainInputs& inputs) { inputs.data.test = inputs.data.train; },
            point_options());
  EXPECT_NE(text.find("expected test data with an end, got a stream"),
            std::string::npos)
      << text;
  text = error_of([] { in_order(std::make_shared<PointStream>()); });
  EXPECT_NE(text.find("a stream decides its own order"), std::string::npos)
      << text;
}

/// Evaluations between updates read other data; the stream continues behind them.
TEST(OwnData, StreamsArePlannedAndEvaluated) {
  TrainOptions options = point_options();
  options.batch = 0;
  options.memory_limit = testing::enough_memory();
  options.eval_every = 2;
  options.resolve();
  TrainInputs inputs = point_inputs(std::make_shared<PointStream>());
  inputs.data.test = std::make_shared<Points>();
  Trainer trainer(std::move(inputs), options);
  const TrainSummary summary = trainer.run().summary;
  EXPECT_EQ(summary.steps, 6);
  EXPECT_EQ(summary.replans, 0);
  EXPECT_LE(summary.peak_bytes, options.memory_limit);
  ASSERT_TRUE(summary.eval_loss.has_value());

  TrainOptions unplanned = point_options();
  unplanned.eval_every = 2;
  const testing::TemporaryDirectory folder;
  const auto evaluated = train_points(
      folder / "run",
      [] {
        TrainInputs made = point_inputs(std::make_shared<PointStream>());
        made.data.test = std::make_shared<Points>();
        return made;
      },
      unplanned);
  const auto plain = train_points(std::make_shared<PointStream>());
  for (size_t i = 0; i < plain.tensors.size(); ++i) {
    EXPECT_TRUE(
        testing::same(plain.tensors[i].second, evaluated.tensors[i].second))
        << plain.tensors[i].first;
  }
}

TEST(OwnData, RegisteredStreamsAreFoundByName) {
  register_dataset({.name = "endless-points", .open = [](const DataOptions&) {
                      return std::make_shared<PointStream>();
                    }});
  TrainConfig config;
  config.data = "endless-points";
  config.evaluate = false;
  const TrainData data = open_train_data(config, point_inputs(nullptr).model);
  EXPECT_EQ(data.train->size(), StreamDataset::kEndless);
  EXPECT_EQ(data.train->get({0, 1}).samples, 2);
}

}  // namespace
}  // namespace reprise
