// A STAND-IN until the planner of plan/ is joined to sessions: goes through fixed
// strategies that keep less and less, and measures nothing.
#include <reprise/memory/bytes.h>
#include <reprise/recompute/strategy.h>
#include <reprise/train/planning.h>

#include <fmt/format.h>

#include <array>
#include <utility>

namespace reprise {
namespace {

class StubPlanner final : public BudgetPlanner {
 public:
  StubPlanner(const TrainConfig& config, int stages)
      : config_(config), stages_(stages) {}

  Decision decide() override {
    return decision(config_.batch > 0 ? config_.batch : config_.global_batch,
                    kStrategies[0]);
  }

  std::optional<Decision> tighten(const Decision& present, int64_t) override {
    for (size_t i = 0; i + 1 < kStrategies.size(); ++i) {
      if (schedule(kStrategies[i]).ops() != present.schedule.ops()) continue;
      for (size_t next = i + 1; next < kStrategies.size(); ++next) {
        if (schedule(kStrategies[next]).ops() == present.schedule.ops()) break;
        return decision(present.micro_batch, kStrategies[next]);
      }
    }
    if (present.micro_batch == 1) return std::nullopt;
    return decision((present.micro_batch + 1) / 2, kStrategies.back());
  }

 private:
  static constexpr std::array<const char*, 3> kStrategies = {"none", "sqrt",
                                                             "all"};

  Schedule schedule(const char* strategy) const {
    return make_schedule(strategy, stages_);
  }

  Decision decision(int64_t micro_batch, const char* strategy) const {
    const int64_t accumulate =
        (config_.global_batch + micro_batch - 1) / micro_batch;
    return {
        micro_batch,
        accumulate,
        schedule(strategy),
        config_.memory_limit,
        0,
        fmt::format("{} × {} samples, recompute {} for {}", micro_batch,
                    accumulate, strategy, format_bytes(config_.memory_limit))};
  }

  const TrainConfig config_;
  const int stages_;
};

}  // namespace

std::unique_ptr<BudgetPlanner> make_budget_planner(const PlanningParts& parts) {
  return std::make_unique<StubPlanner>(parts.config, parts.model.chain.size());
}

}  // namespace reprise
