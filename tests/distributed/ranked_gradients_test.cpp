#include "distributed/reducer.h"
#include "ranks.h"

#include <reprise/accumulate/accumulator.h>
#include <reprise/data/loader.h>
#include <reprise/models/model.h>
#include <reprise/ops/weight_copies.h>
#include <reprise/recompute/execution.h>
#include <reprise/recompute/strategy.h>

#include <map>
#include <optional>

namespace reprise::testing {
namespace {

constexpr int64_t kSamples = 24;  // two windows of 11 and one of 2
constexpr int64_t kWindow = 11;

/// Images, or sequences with different numbers of targets that count.
class Sequences final : public Dataset {
 public:
  explicit Sequences(const Model& model) {
    torch::manual_seed(11);
    const auto& o = model.options;
    images_ = model.task == Task::kImages;
    if (images_) {
      inputs_ =
          torch::randn({kSamples, o.channels, o.image_size, o.image_size});
      targets_ = torch::randint(o.classes, {kSamples}, torch::kLong);
      return;
    }
    inputs_ = torch::randint(o.vocab, {kSamples, o.seq}, torch::kLong);
    targets_ = torch::randint(o.vocab, {kSamples, o.seq}, torch::kLong);
    for (int64_t i = 0; i < kSamples; ++i) {
      targets_[i].slice(0, 1 + i % o.seq, o.seq).fill_(-100);
    }
  }
  int64_t size() const override { return kSamples; }
  int64_t count(int64_t i) const override {
    return images_ ? 1 : (targets_[i] != -100).sum().item<int64_t>();
  }
  Batch get(const std::vector<int64_t>& indices) const override {
    const auto list = torch::tensor(indices);
    Batch batch;
    batch.tensors = {inputs_.index_select(0, list),
                     targets_.index_select(0, list)};
    batch.samples = static_cast<int64_t>(indices.size());
    for (const int64_t i : indices) batch.count += count(i);
    return batch;
  }
  std::string description() const override { return "sequences"; }

 private:
  bool images_ = false;
  torch::Tensor inputs_, targets_;
};

Model make(const std::string& name) {
  torch::manual_seed(3);
  ModelOptions options;
  options.dropout = 0;
  if (name == "gpt2") {  // its embedding and head are tied
    options.depth = 3;
    options.width = 16;
    options.heads = 2;
    options.vocab = 32;
    options.seq = 8;
  } else {
    options.depth = 3;
    options.width = 12;
    options.image_size = 6;
  }
  Model model = make_model(name, options);
  model.root->train();
  return model;
}

/// Gradients of each window, computed by one process without accumulation.
std::vector<std::vector<torch::Tensor>> plain_gradients(const Model& model) {
  std::vector<std::vector<torch::Tensor>> windows;
  const auto data = std::make_shared<Sequences>(model);
  Loader loader(data, {.batch = kWindow, .window = kWindow, .workers = 0});
  while (auto batch = loader.next()) {
    Tensors x = batch->tensors;
    for (int i = 0; i < model.chain.size(); ++i) x = model.chain[i](x);
    (x[0] / static_cast<double>(batch->count)).backward();
    windows.push_back(take_gradients(model.root->parameters()));
  }
  return windows;
}

/// Gradients of each window, computed by all ranks of `group`.
void ranked_gradients(const Model& model, const std::string& strategy,
                      int64_t micro, const std::shared_ptr<RankGroup>& group,
                      std::vector<std::vector<torch::Tensor>>& windows) {
  std::map<const void*, int> first;
  for (int i = model.chain.size(); i-- > 0;) {
    for (const auto& module : model.chain[i].modules()) {
      for (const auto& p : module->parameters()) {
        first[p.unsafeGetTensorImpl()] = i;
      }
    }
  }
  std::vector<GradientReducer::Parameter> list;
  for (const auto& item : model.root->named_parameters()) {
    list.push_back({item.key(), item.value(),
                    first.at(item.value().unsafeGetTensorImpl())});
  }
  GradientReducer reducer(group, list, {.bucket_bytes = 1024});
  EXPECT_GE(reducer.buckets(), 2);
  bool last = false;
  std::vector<int64_t> started;  // after each segment of the last backward
  Execution execution(model.chain, make_schedule(strategy, model.chain.size()),
                      {.cuts = reducer.cuts(), .final_from = [&](int stage) {
                         if (!last) return;
                         reducer.final_from(stage);
                         started.push_back(reducer.started());
                       }});
  const auto data = std::make_shared<Sequences>(model);
  Loader loader(data, {.batch = micro,
                       .window = kWindow,
                       .shard = group->rank(),
                       .num_shards = group->size(),
                       .workers = 0});
  Accumulator accumulator(model.root->parameters());
  int64_t calls = 0;
  while (!loader.epoch_done()) {
    const auto window = loader.window_ahead();
    accumulator.begin_share(double(window.total_count), double(window.count));
    for (int64_t i = 0; i < window.batches; ++i) {
      const auto batch = loader.next();
      const double weight = accumulator.weigh(double(batch->count));
      last = accumulator.complete();
      EXPECT_EQ(last, i + 1 == window.batches);
      // No bucket starts before the last micro-batch.
      EXPECT_EQ(reducer.counters().calls, calls);
      started.clear();
      const auto outputs = execution.forward(batch->tensors);
      execution.backward({torch::full_like(outputs[0], weight)});
      last = false;
    }
    loader.advance_window();
    if (window.batches > 0) {
      // Some buckets start before the end, and all have started at the end.
      ASSERT_GT(started.size(), 1u);
      EXPECT_GT(started[started.size() - 2], 0);
      EXPECT_LT(started.front(), reducer.buckets());
      EXPECT_EQ(started.back(), reducer.buckets());
    }
    reducer.finish({});
    calls += reducer.buckets();
    EXPECT_EQ(reducer.counters().calls, calls);
    windows.push_back(take_gradients(model.root->parameters()));
    accumulator.abandon();
  }
  int64_t bytes = 0;
  for (const auto& p : model.root->parameters()) {
    bytes += static_cast<int64_t>(p.nbytes());
  }
  EXPECT_EQ(reducer.counters().bytes,
            bytes * static_cast<int64_t>(windows.size()));
}

void compare(const std::string& name, const std::string& strategy,
             int64_t micro, const std::shared_ptr<RankGroup>& group,
             bool direct = false) {
  const Model model = make(name);
  const auto expected = plain_gradients(model);
  // Linear layers whose backward accumulates directly into `.grad`.
  std::optional<WeightCopies> copies;
  if (direct) copies.emplace(model.linear_parameters(), torch::kFloat);
  int64_t by_autograd = 0;
  model.linear_parameters().back().register_hook(
      [&](const torch::Tensor& gradient) {
        by_autograd +=
            gradient
                .defined();  // newer LibTorch calls it without a gradient too
      });
  std::vector<std::vector<torch::Tensor>> found;
  ranked_gradients(model, strategy, micro, group, found);
  EXPECT_EQ(by_autograd == 0, direct);
  ASSERT_EQ(expected.size(), 3u);
  ASSERT_EQ(found.size(), expected.size());
  const auto names = model.root->named_parameters().keys();
  for (size_t w = 0; w < expected.size(); ++w) {
    for (size_t p = 0; p < names.size(); ++p) {
      EXPECT_LT(relative_error(expected[w][p], found[w][p]), 1e-6)
          << name << " " << strategy << " window " << w << " " << names[p]
          << (direct ? ", direct" : "");
    }
  }
}

void compare_gradients() {
  const auto group = RankGroup::join(group_options());
  for (const char* strategy :
       {"none", "all", "sqrt", "every:2", "checkpoints:2", "revolve:2"}) {
    for (const char* name : {"gpt2", "mlp"}) {
      compare(name, strategy, /*micro=*/2, group);
    }
    compare("gpt2", strategy, /*micro=*/2, group, /*direct=*/true);
  }
  group->leave();
}

TEST(RankedGradients, MatchOneProcess) {
  expect_all_well(in_ranks({.ranks = 1}, compare_gradients));
}

TEST(RankedGradients, MatchOneProcessOnTwoRanks) {
  expect_all_well(in_ranks({.ranks = 2}, compare_gradients));
}

// The last window has two samples, so two ranks have none.
TEST(RankedGradients, MatchOneProcessOnFourRanks) {
  expect_all_well(in_ranks({.ranks = 4}, compare_gradients));
}

}  // namespace
}  // namespace reprise::testing
