#pragma once

#include "train/runs.h"

#include <reprise/data/stream.h>

#include <torch/nn/modules/linear.h>

#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

/// A regression on masked points, as a dataset and as a stream of the same samples.
namespace reprise::testing {

constexpr int64_t kPoints = 24;
constexpr int64_t kPointWidth = 6;

/// Every point has 3 positions, of which the first count. Every fifth point has none that
/// counts.
class Points : public Dataset {
 public:
  Points() {
    auto generator = at::detail::createCPUGenerator(5);
    x = torch::randn({kPoints, 3, kPointWidth}, generator);
    y = torch::randn({kPoints, 3}, generator);
  }
  int64_t size() const override { return kPoints; }
  static int64_t positions(int64_t index) {
    return index % 5 == 0 ? 0 : 1 + index % 3;
  }
  int64_t count(int64_t index) const override { return positions(index); }
  Batch get(const std::vector<int64_t>& indices) const override {
    const auto rows = torch::tensor(indices);
    Batch batch{
        .tensors = {x.index_select(0, rows), torch::zeros({rows.size(0), 3}),
                    y.index_select(0, rows)},
        .samples = rows.size(0)};
    for (int64_t i = 0; i < batch.samples; ++i) {
      const int64_t own = positions(indices[static_cast<size_t>(i)]);
      batch.tensors[1][i].narrow(0, 0, own).fill_(1);
      batch.count += own;
    }
    return batch;
  }
  std::string description() const override { return "points"; }

  torch::Tensor x, y;
};

/// Points by index, again and again.
class PointStream final : public StreamDataset {
 public:
  class Reader final : public SampleStream {
   public:
    explicit Reader(int64_t at) : at_(at) {}
    Batch read(int64_t samples) override {
      std::vector<int64_t> indices;
      for (; samples > 0; --samples) indices.push_back(at_++ % kPoints);
      return points_.get(indices);
    }
    std::string position() const override {
      return std::string("\xff\0", 2) + std::to_string(at_);
    }

   private:
    Points points_;
    int64_t at_;
  };
  std::unique_ptr<SampleStream> open(
      const std::string& position) const override {
    return std::make_unique<Reader>(
        position.empty() ? 0 : std::stoll(position.substr(2)));
  }
  std::string description() const override { return "endless points"; }
};

/// `data` by index, in every epoch.
inline std::shared_ptr<const Dataset> in_order(
    const std::shared_ptr<const Dataset>& data) {
  return with_order(data, [n = data->size()](int64_t, uint64_t) {
    std::vector<int64_t> order(static_cast<size_t>(n));
    std::iota(order.begin(), order.end(), int64_t{0});
    return order;
  });
}

inline TrainInputs point_inputs(std::shared_ptr<const Dataset> data,
                                double dropout = 0.2) {
  torch::manual_seed(7);
  auto root = std::make_shared<torch::nn::Module>();
  auto first =
      root->register_module("first", torch::nn::Linear(kPointWidth, 8));
  auto last = root->register_module("last", torch::nn::Linear(8, 1));
  Chain chain(
      {make_stage("first",
                  [first, dropout](const torch::Tensor& x) {
                    return torch::dropout(torch::tanh(first->forward(x)),
                                          dropout, first->is_training());
                  },
                  {first})
           .on_first(),
       make_stage("loss",
                  [last](const torch::Tensor& h, const torch::Tensor& mask,
                         const torch::Tensor& y) {
                    const auto errors = last->forward(h).squeeze(-1) - y;
                    return Tensors{(errors.pow(2) * mask).sum()};
                  },
                  {last})});
  return {Model{.name = "points", .root = root, .chain = chain},
          {.name = "points", .train = std::move(data)}};
}

/// Windows of 8 in micro-batches of 3, 3 and 2.
inline TrainOptions point_options(int64_t steps = 6) {
  TrainOptions options;
  options.device = device().str();
  options.batch = 3;
  options.global_batch = 8;
  options.steps = steps;
  options.workers = 1;
  options.rate.base = 0.01;
  options.graph = GraphMode::kOff;
  return options;
}

/// Trains in the run directory `path`. The training is stopped and resumed after each of
/// `stops` micro-batches.
inline Ended train_points(const std::string& path,
                          const std::function<TrainInputs()>& inputs,
                          TrainOptions options,
                          const std::vector<int>& stops = {},
                          TrainListener* listener = nullptr) {
  options.resolve();
  Ended ended;
  for (size_t i = 0; i <= stops.size(); ++i) {
    auto directory = i == 0 ? RunDirectory::create(path, to_json(options))
                            : RunDirectory::open(path);
    int left = i < stops.size() ? stops[i] : -1;
    Trainer trainer(inputs(), options_from_json(directory.config()));
    TrainRun run;
    run.directory = &directory;
    run.resume = i > 0;
    run.listener = listener;
    run.stop = [&left] { return left-- == 0; };
    ended.result = trainer.run(run);
    EXPECT_EQ(ended.result.stopped, i < stops.size());
    ended.tensors =
        detail::newest_state(directory, [](const auto&) { FAIL(); })->tensors;
    ended.metrics = read_text(directory.metrics_path());
  }
  return ended;
}

inline Ended train_points(const std::shared_ptr<const Dataset>& data,
                          const TrainOptions& options = point_options(),
                          const std::vector<int>& stops = {},
                          TrainListener* listener = nullptr) {
  const TemporaryDirectory folder;
  return train_points(
      folder.path() + "/run", [&] { return point_inputs(data); }, options,
      stops, listener);
}

}  // namespace reprise::testing
