#include "fetch_ahead.h"
#include "solver_model.h"
#include "solver_table.h"

#include <reprise/plan/solver.h>
#include <reprise/recompute/strategy.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <future>
#include <numeric>
#include <utility>

namespace reprise {
namespace {

using plan::ChainModel;
using plan::LeastMemory;
using plan::TimeTable;
using Solution = Solver::Solution;

constexpr int kFewestSlots = 192;
constexpr int kMostSlots = 4096;

bool better(const Simulation& a, const Simulation& b) {
  if (a.time_ms != b.time_ms) return a.time_ms < b.time_ms;
  return a.peak_bytes < b.peak_bytes;
}

/// Sorts by memory and leaves out what others beat or equal.
std::vector<Solution> pareto(std::vector<Solution> list) {
  std::stable_sort(list.begin(), list.end(),
                   [](const Solution& a, const Solution& b) {
                     const auto &x = a.simulation, &y = b.simulation;
                     if (x.peak_bytes != y.peak_bytes) {
                       return x.peak_bytes < y.peak_bytes;
                     }
                     return x.time_ms < y.time_ms;
                   });
  std::vector<Solution> front;
  for (Solution& solution : list) {
    if (front.empty() ||
        solution.simulation.time_ms < front.back().simulation.time_ms) {
      front.push_back(std::move(solution));
    }
  }
  return front;
}

/// 1 … most; where those are many, about forty of them in growing steps.
std::vector<int> numbers_up_to(int most) {
  std::vector<int> numbers;
  for (int i = 1; i <= most; i = most <= 64 ? i + 1 : i + 1 + i / 8) {
    numbers.push_back(i);
  }
  return numbers;
}

std::vector<Strategy> strategies_for(int stages) {
  std::vector<Strategy> list = {{StrategyKind::kNone, 0},
                                {StrategyKind::kAll, 0},
                                {StrategyKind::kSqrt, 0}};
  for (const int k : numbers_up_to(stages)) {
    list.push_back({StrategyKind::kEvery, k});
    list.push_back({StrategyKind::kCheckpoints, k - 1});
    // With one slot the operations grow with the square of the stages.
    if (k > 1 || stages <= 200) list.push_back({StrategyKind::kRevolve, k});
  }
  return list;
}

/// Every stage kept, each as the fastest of its variants.
std::vector<Op> keep_all_fastest(const ChainModel& model) {
  std::vector<Op> ops;
  for (int s = 0; s < model.stages; ++s) {
    const auto& keeps = model.context(s, 0).keeps;
    const auto best = std::min_element(
        keeps.begin(), keeps.end(),
        [](const plan::Keep& a, const plan::Keep& b) {
          return std::pair(a.ms, a.held_bytes) < std::pair(b.ms, b.held_bytes);
        });
    ops.push_back({OpKind::kForwardKeep, s, best->variant});
  }
  for (int s = model.stages - 1; s >= 0; --s) {
    ops.push_back({OpKind::kBackward, s});
  }
  return ops;
}

/// The largest number of bytes that all sizes are multiples of.
int64_t common_divisor(const ChainFigures& figures) {
  int64_t divisor = figures.output_gradient_bytes;
  const auto add = [&](int64_t bytes) { divisor = std::gcd(divisor, bytes); };
  const auto add_run = [&](const KeptRunFigures& run) {
    add(run.saved_bytes);
    add(run.keep_extra_bytes);
    add(run.backward_extra_bytes);
  };
  for (const auto& stage : figures.stages) {
    for (const auto& buffer : stage.outputs) {
      if (buffer.input < 0) add(buffer.bytes);
    }
    add(stage.input_gradient_bytes);
    add(stage.drop_extra_bytes);
    add_run(stage);
    for (const auto& variant : stage.variants) add_run(variant);
  }
  return std::max<int64_t>(divisor, 1);
}

/// As many slots as keep a table's additions near a number that grows with the
/// chain: 0.1 s of one core for 100 stages, 3 s for 1,000. For 100 stages that
/// is 200 slots; on one uneven chain, at eight budgets, times were within 2.1 %
/// of those with 4,096.
int slots_for(const ChainModel& model) {
  double additions = 0;  // a slot
  for (int s = 0; s < model.stages; ++s) {
    const auto ends = static_cast<double>(model.ends_of(s).size());
    additions +=
        ends * (ends + 1) / 2 *
        static_cast<double>(model.contexts[static_cast<size_t>(s)].size());
  }
  const double wanted = 1.8e5 * std::pow(model.stages, 1.3) / additions;
  return static_cast<int>(std::clamp<double>(wanted, kFewestSlots, kMostSlots));
}

}  // namespace

class Solver::Impl {
 public:
  Impl(ChainFigures figures, const SolverOptions& options)
      : figures_(std::move(figures)), model_(plan::make_chain_model(figures_)) {
    std::vector<Solution> list;
    for (const Strategy& strategy : strategies_for(model_.stages)) {
      list.push_back(judge(make_schedule(strategy, model_.stages)));
    }
    list.push_back(judge(LeastMemory(model_).ops()));
    list.push_back(judge(keep_all_fastest(model_)));
    const int64_t most = list.back().simulation.peak_bytes;
    known_ = pareto(std::move(list));
    make_tables(most, options.slots);
    largest_bytes_ = solve(most)->simulation.peak_bytes;
  }

  int64_t smallest_bytes() const {
    return known_.front().simulation.peak_bytes;
  }
  int64_t largest_bytes() const { return largest_bytes_; }

  std::optional<Solution> solve(int64_t bytes) const {
    const auto fits = [&](const Solution& solution) {
      return solution.simulation.peak_bytes <= bytes;
    };
    const auto behind =
        std::partition_point(known_.begin(), known_.end(), fits);
    if (behind == known_.begin()) return std::nullopt;
    std::optional<Solution> best = *(behind - 1);
    size_t i = 0;
    while (i + 1 < tables_.size() && bytes <= tables_[i + 1].reach_bytes()) ++i;
    search(tables_[i], bytes, *best);
    if (best->simulation.host_peak_bytes > 0) {
      best = judge(plan::fetch_ahead(best->schedule, figures_, bytes));
    }
    return best;
  }

  std::vector<Solution> frontier(int points) const {
    TORCH_CHECK(points >= 2, "[Solver::frontier] expected at least 2 points, ",
                "got ", points);
    const auto low =
        static_cast<double>(std::max<int64_t>(smallest_bytes(), 1));
    const double ratio = static_cast<double>(largest_bytes_) / low;
    std::vector<Solution> list = {*solve(smallest_bytes()),
                                  *solve(largest_bytes_)};
    for (int i = 1; i + 1 < points; ++i) {
      const double bytes = low * std::pow(ratio, double(i) / (points - 1));
      list.push_back(
          *solve(std::max<int64_t>(std::llround(bytes), smallest_bytes())));
    }
    return pareto(std::move(list));
  }

  int64_t table_bytes() const {
    int64_t bytes = 0;
    for (const TimeTable& table : tables_) bytes += table.table_bytes();
    return bytes;
  }

 private:
  Solution judge(Schedule schedule) const {
    Simulation simulation = simulate(schedule, figures_);
    return {std::move(schedule), std::move(simulation)};
  }
  Solution judge(std::vector<Op> ops) const {
    return judge(Schedule("optimal", model_.stages, std::move(ops)));
  }

  void make_tables(int64_t most, int slots) {
    const int64_t unit = common_divisor(figures_);
    if (slots == 0) slots = slots_for(model_);
    // Where a stage is smaller than a slot, rounding decides which are kept.
    const int first_slots = std::max(slots, model_.stages);
    if (most / unit <= first_slots) {  // exact
      tables_.emplace_back(model_, unit, static_cast<int>(most / unit));
      return;
    }
    std::vector<std::future<TimeTable>> running;
    const auto start = [&](int64_t slot, int count) {
      running.push_back(std::async(std::launch::async, [this, slot, count] {
        return TimeTable(model_, slot, count);
      }));
    };
    int64_t slot = most / first_slots + 1;
    start(slot, first_slots);
    // The next table has the budgets for which this one has few slots.
    while (slot > 4 && slot * (slots / 4) > smallest_bytes()) {
      slot /= 4;
      start(slot, slots);
    }
    for (auto& table : running) tables_.push_back(table.get());
  }

  /// Tries the schedules for this many bytes and for some more and fewer: the
  /// table's sums are rounded, and simulate() says what really fits.
  void search(const TimeTable& table, int64_t bytes, Solution& best) const {
    if (!table.fewest()) return;
    const int fewest = *table.fewest(), most = table.most();
    const auto fits = [&](int slots) {
      Solution solution = judge(table.ops(slots));
      if (solution.simulation.peak_bytes > bytes) return false;
      if (better(solution.simulation, best.simulation)) {
        best = std::move(solution);
      }
      return true;
    };
    int good = fewest - 1, bad = most + 1;
    int next = static_cast<int>(
        std::clamp<int64_t>(bytes / table.slot_bytes(), fewest, most));
    // Away from the nominal number in growing steps, then by halves.
    for (int step = 1; bad - good > 1; step *= 2) {
      (fits(next) ? good : bad) = next;
      if (bad > most) {
        next = std::min(good + step, most);
      } else if (good < fewest) {
        next = std::max(bad - step, fewest);
      } else {
        next = good + (bad - good) / 2;
      }
    }
    // More slots can also mean less memory, where sizes round that way.
    for (int more = bad + 1; more <= std::min(bad + 3, most); ++more) {
      fits(more);
    }
  }

  ChainFigures figures_;
  ChainModel model_;
  std::vector<Solution> known_;    // of rising memory and falling time
  std::vector<TimeTable> tables_;  // from all budgets down to the smallest
  int64_t largest_bytes_ = 0;
};

Solver::Solver(ChainFigures figures, const SolverOptions& options) {
  TORCH_CHECK(!figures.stages.empty(),
              "[Solver] expected figures for at least one stage, got none");
  TORCH_CHECK(options.slots >= 0 && options.slots <= (1 << 20),
              "[Solver] expected between 0 and 1048576 slots, got ",
              options.slots);
  impl_ = std::make_unique<Impl>(std::move(figures), options);
}
Solver::~Solver() = default;
Solver::Solver(Solver&&) noexcept = default;
Solver& Solver::operator=(Solver&&) noexcept = default;

int64_t Solver::smallest_bytes() const {
  return impl_->smallest_bytes();
}

int64_t Solver::largest_bytes() const {
  return impl_->largest_bytes();
}

std::optional<Solution> Solver::solve(int64_t bytes) const {
  return impl_->solve(bytes);
}

std::vector<Solution> Solver::frontier(int points) const {
  return impl_->frontier(points);
}

int64_t Solver::table_bytes() const {
  return impl_->table_bytes();
}

}  // namespace reprise
