#include "train/budget/schedule_timer.h"

#include "data/batch_check.h"
#include "train/step/graph_runs.h"

#include <reprise/recompute/strategy.h>

#include <chrono>
#include <thread>

namespace reprise {
namespace {

using detail::ScheduleTimer;

/// A CUDA graph whose capture takes long.
class SlowCapture final : public detail::Recorded {
 public:
  explicit SlowCapture(int& captures) : captures_(captures) {}
  void capture(const std::function<void()>& body) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(600));
    body_ = body;
    ++captures_;
  }
  void replay() override { body_(); }
  int64_t bytes() const override { return 0; }

 private:
  std::function<void()> body_;
  int& captures_;
};

TEST(ScheduleTimer, DoesNotTimeTheCapture) {
  int captures = 0;
  const detail::RecordedInstead instead(
      [&] { return std::make_unique<SlowCapture>(captures); });
  TrainConfig config = testing::small();
  config.resolve();
  const auto setup = detail::make_setup(config);
  const Schedule schedule = make_schedule("none", setup.model.chain.size());
  const auto ms_of = [&](bool graph, bool warm_up) {
    return ScheduleTimer(setup)
        .time({.micro_batch = 4, .schedule = schedule, .graph = graph},
              detail::largest_batch(*setup.data.train, 4),
              {.warm_up = warm_up, .rows = 1})
        .ms;
  };
  const double plain = ms_of(false, true);
  for (const bool warm_up : {false, true}) {
    captures = 0;
    EXPECT_LT(ms_of(true, warm_up), 4 * plain + 1) << warm_up;
    EXPECT_EQ(captures, 1);
  }
}

}  // namespace
}  // namespace reprise
