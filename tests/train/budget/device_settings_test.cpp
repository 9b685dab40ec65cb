#include "train/budget/device_settings.h"

#include "train/runs.h"

namespace reprise {
namespace {

using detail::make_setup;
using detail::TrainSetup;

/// A second rank, to which the first sends `text`.
class SecondRank final : public detail::Ranks {
 public:
  explicit SecondRank(std::string text) : text_(std::move(text)) {}
  int rank() const override { return 1; }
  int size() const override { return 2; }
  bool can_stop_in_window() const override { return false; }
  std::vector<int64_t> all_reduce_max(std::vector<int64_t> v) override {
    return v;
  }
  std::vector<double> all_reduce_sum(std::vector<double> v) override {
    return v;
  }
  std::string broadcast_text(const std::string&) override { return text_; }
  void broadcast(const std::vector<torch::Tensor>&) override {}
  void broadcast_named(NamedTensors&) override {}
  void require_same(const std::map<std::string, std::string>&) override {}
  void heartbeat() override {}
  void pause_watchdog() override {}
  void fail(const std::string&) noexcept override {}
  std::shared_ptr<RankGroup> group() const override { return nullptr; }

 private:
  std::string text_;
};

TrainConfig config_of(const std::string& model, int64_t steps) {
  TrainConfig config = testing::small(model);
  config.epochs = 0;
  config.steps = steps;
  config.resolve();
  return config;
}

bool has_channels_last_weights(const TrainSetup& setup) {
  for (const auto& p : setup.parameter_list) {
    if (p.dim() == 4 && !p.is_contiguous()) return true;
  }
  return false;
}

void settle(TrainSetup& setup, std::vector<std::string>* said = nullptr,
            int64_t memory = 0) {
  const auto alone = detail::make_ranks(nullptr);
  const auto say = [&](const std::string& line) {
    if (said != nullptr) said->push_back(line);
  };
  detail::settle_device_settings(setup, *alone, {.memory = memory, .say = say});
}

TEST(DeviceSettings, GivenOnesStay) {
  TrainConfig config = config_of("cnn-blocks", 1000);
  config.layout = ImageLayout::kChannelsLast;
  config.autotune = Autotune::kOff;
  TrainSetup setup = make_setup(config);
  settle(setup);
  EXPECT_EQ(setup.options.layout, ImageLayout::kChannelsLast);
  EXPECT_FALSE(setup.settings.has_value());
  EXPECT_TRUE(has_channels_last_weights(setup));
}

TEST(DeviceSettings, ARuleDecidesForShortTrainings) {
  const bool cuda = testing::device().is_cuda();
  for (const Precision precision : {Precision::kFp32, Precision::kBf16}) {
    TrainConfig config = config_of("cnn-blocks", 3);
    config.precision = precision;
    TrainSetup setup = make_setup(config);
    std::vector<std::string> said;
    settle(setup, &said);
    const bool last = cuda && precision == Precision::kBf16;
    EXPECT_EQ(setup.options.layout,
              last ? ImageLayout::kChannelsLast : ImageLayout::kPlanes);
    EXPECT_EQ(setup.options.autotune, Autotune::kOff);
    EXPECT_EQ(has_channels_last_weights(setup), last);
    EXPECT_TRUE(said.empty());
  }
}

TEST(DeviceSettings, ModelsWithoutConvolutionsHaveNothingToChoose) {
  TrainSetup setup = make_setup(config_of("mlp", 1000));
  std::vector<std::string> said;
  settle(setup, &said);
  EXPECT_EQ(setup.options.layout, ImageLayout::kPlanes);
  EXPECT_FALSE(setup.settings.has_value());
  EXPECT_TRUE(said.empty());
}

TEST(DeviceSettings, OtherRanksAdoptTheChoiceOfTheFirst) {
  TrainSetup setup = make_setup(config_of("cnn-blocks", 1000));
  SecondRank second("channels-last on");
  detail::settle_device_settings(setup, second, {});
  const bool cuda = testing::device().is_cuda();
  EXPECT_EQ(setup.options.layout,
            cuda ? ImageLayout::kChannelsLast : ImageLayout::kPlanes);
  EXPECT_EQ(setup.options.autotune, cuda ? Autotune::kOn : Autotune::kOff);
  EXPECT_EQ(has_channels_last_weights(setup), cuda);
}

TEST(DeviceSettings, LongTrainingsMeasureAndLeaveTheModelAsItWas) {
  if (!testing::device().is_cuda()) GTEST_SKIP() << "needs CUDA";
  TrainConfig config = config_of("cnn-blocks", 1000);
  TrainSetup setup = make_setup(config);
  std::vector<torch::Tensor> before;
  for (const auto& p : setup.parameter_list) {
    before.push_back(p.detach().clone());
  }
  for (const auto& b : setup.model.root->buffers()) before.push_back(b.clone());
  torch::manual_seed(7);
  const auto drawn = torch::rand({4}, setup.device);
  torch::manual_seed(7);
  std::vector<std::string> said;
  settle(setup, &said);
  EXPECT_GE(said.size(), 4u);  // two layouts, autotuning, the choice
  ASSERT_TRUE(setup.settings.has_value());
  EXPECT_EQ(setup.settings->layout, setup.options.layout);
  EXPECT_NE(setup.options.layout, ImageLayout::kAuto);
  EXPECT_NE(setup.options.autotune, Autotune::kAuto);
  EXPECT_EQ(has_channels_last_weights(setup),
            setup.options.layout == ImageLayout::kChannelsLast);
  size_t i = 0;
  for (const auto& p : setup.parameter_list) {
    EXPECT_TRUE(torch::equal(p, before[i++]));
    EXPECT_FALSE(p.grad().defined());
  }
  for (const auto& b : setup.model.root->buffers()) {
    EXPECT_TRUE(torch::equal(b, before[i++]));
  }
  EXPECT_TRUE(torch::equal(torch::rand({4}, setup.device), drawn));
}

TEST(DeviceSettings, NothingIsTriedThatABudgetMayNotHold) {
  if (!testing::device().is_cuda()) GTEST_SKIP() << "needs CUDA";
  TrainSetup setup = make_setup(config_of("cnn-blocks", 1000));
  std::vector<std::string> said;
  settle(setup, &said, testing::enough_memory());
  EXPECT_EQ(setup.options.autotune, Autotune::kOff);
  for (const std::string& line : said) {
    EXPECT_EQ(line.find("autotune on"), std::string::npos) << line;
  }
}

TEST(DeviceSettings, CountsTheMicroBatchesOfATraining) {
  TrainConfig config = config_of("mlp", 7);
  config.batch = 4;
  config.accumulate = 3;
  config.global_batch = 12;
  config.random_samples = 25;
  TrainSetup setup = make_setup(config);
  EXPECT_EQ(detail::micro_batches_of(setup), 21);
  setup.options.steps = 0;
  setup.options.epochs = 2;
  EXPECT_EQ(detail::micro_batches_of(setup), 2 * 3 * 3);
  setup.options.seconds = 5;
  EXPECT_GT(detail::micro_batches_of(setup), int64_t{1} << 60);
}

}  // namespace
}  // namespace reprise
