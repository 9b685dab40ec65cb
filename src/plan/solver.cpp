#include "plan/fetch_ahead.h"
#include "plan/solver_model.h"
#include "plan/solver_table.h"

#include <reprise/plan/solver.h>
#include <reprise/recompute/strategy.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <numeric>
#include <utility>

namespace reprise {
namespace {

using detail::ChainModel;
using detail::TimeTable;
using Solution = Solver::Solution;

constexpr double kFirstReach = 1.125, kReachRatio = 1.6;
// A budget is little up to this multiple of the minimum. It needs long
// intervals, because the same stages are recomputed repeatedly. With more
// memory there are fewer of these, and finer slots are more useful than more
// intervals.
constexpr double kLittleReach = 1.9;
constexpr detail::ModelLimits kLittleMemory = {
    .all = 128, .near = 64, .far = 64};
constexpr detail::ModelLimits kMuchMemory = {.all = 48, .near = 32, .far = 32};
constexpr int64_t kTableBytes = 96 << 20;  // limit per table
constexpr int64_t kAllTablesBytes = 256 << 20;

bool better(const Simulation& a, const Simulation& b) {
  if (a.time_ms != b.time_ms) return a.time_ms < b.time_ms;
  return a.peak_bytes < b.peak_bytes;
}

/// Sorts by memory and omits solutions that others dominate.
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

/// Returns the greatest common divisor of all sizes, in bytes.
int64_t common_divisor(const ChainCosts& chain_costs) {
  int64_t divisor = chain_costs.output_gradient_bytes;
  const auto add = [&](int64_t bytes) { divisor = std::gcd(divisor, bytes); };
  const auto add_run = [&](const KeptRunCosts& run) {
    add(run.saved_bytes);
    add(run.keep_extra_bytes);
    add(run.backward_extra_bytes);
  };
  for (const auto& stage : chain_costs.stages) {
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

/// Returns the number of additions per table: about 0.1 s of one core for 100
/// stages, 2.5 s for 1,000.
double additions_for(int stages) {
  return std::min(1e8 * std::pow(stages / 100.0, 2), 2.5e9);
}

bool passes_tensors_on(const ChainCosts& chain_costs) {
  for (const auto& stage : chain_costs.stages) {
    for (const auto& output : stage.outputs) {
      if (output.input >= 0) return true;
    }
  }
  return false;
}

}  // namespace

class Solver::Impl {
 public:
  Impl(ChainCosts chain_costs, const SolverOptions& options)
      : chain_costs_(std::move(chain_costs)),
        passes_tensors_on_(passes_tensors_on(chain_costs_)),
        little_(chain_costs_, kLittleMemory),
        much_(chain_costs_, kMuchMemory) {
    limits_.slots = options.slots;
    limits_.additions = additions_for(stages());
    limits_.bytes = kTableBytes;
    limits_.unit_bytes = common_divisor(chain_costs_);
    std::vector<Solution> list;
    for (const Strategy& strategy : strategies_for(stages())) {
      list.push_back(evaluate(make_schedule(strategy, stages())));
    }
    list.push_back(evaluate(little_.bounds.smallest_ops()));
    list.push_back(evaluate(little_.bounds.fastest_ops()));
    solutions_ = pareto(std::move(list));
    smallest_bytes_ = solutions_.front().simulation.peak_bytes;
    largest_bytes_ = solutions_.back().simulation.peak_bytes;
  }

  int64_t smallest_bytes() const { return smallest_bytes_; }
  int64_t largest_bytes() const { return largest_bytes_; }

  std::optional<Solution> solve(int64_t bytes) const {
    if (bytes < smallest_bytes_) return std::nullopt;
    Solution best = fastest_known(bytes);
    if (bytes < largest_bytes_ && bytes >= little_.min_bytes()) {
      search(*table_for(bytes), bytes, best);
      remember(best);
    }
    if (best.simulation.host_peak_bytes > 0) {
      best = evaluate(detail::fetch_ahead(best.schedule, chain_costs_, bytes));
    }
    return best;
  }

  std::vector<Solution> frontier(int points) const {
    TORCH_CHECK(points >= 2, "[Solver::frontier] expected at least 2 points, ",
                "got ", points);
    const auto low = static_cast<double>(std::max<int64_t>(smallest_bytes_, 1));
    const double ratio = static_cast<double>(largest_bytes_) / low;
    std::vector<Solution> list;
    for (int i = 0; i + 1 < points; ++i) {
      const double bytes = low * std::pow(ratio, double(i) / (points - 1));
      list.push_back(*solve(
          i == 0 ? smallest_bytes_
                 : std::max<int64_t>(std::llround(bytes), smallest_bytes_)));
    }
    list.push_back(*solve(largest_bytes_));
    return pareto(std::move(list));
  }

  int64_t table_bytes() const {
    const std::lock_guard lock(mutex_);
    int64_t bytes = 0;
    for (const auto& table : tables_) bytes += table->table_bytes();
    return bytes;
  }

 private:
  using Table = std::shared_ptr<const TimeTable>;

  /// A model of the chain with some of its intervals, and their bounds.
  struct Intervals {
    ChainModel model;
    detail::MemoryBounds bounds;

    Intervals(const ChainCosts& chain_costs, const detail::ModelLimits& limits)
        : model(detail::make_chain_model(chain_costs, limits)), bounds(model) {}
    Intervals(const Intervals&) = delete;
    int64_t min_bytes() const { return bounds.min_bytes(bounds.whole()); }
  };

  int stages() const { return little_.model.stages; }

  Solution evaluate(Schedule schedule) const {
    Simulation simulation = simulate(schedule, chain_costs_);
    return {std::move(schedule), std::move(simulation)};
  }
  Solution evaluate(std::vector<Op> ops) const {
    return evaluate(Schedule("optimal", stages(), std::move(ops)));
  }

  Solution fastest_known(int64_t bytes) const {
    const std::lock_guard lock(mutex_);
    const auto behind = std::partition_point(
        solutions_.begin(), solutions_.end(), [&](const Solution& solution) {
          return solution.simulation.peak_bytes <= bytes;
        });
    return *(behind - 1);
  }

  /// Results are candidates for larger budgets, so that a larger budget never
  /// gives a slower schedule than a smaller one did.
  void remember(const Solution& solution) const {
    const std::lock_guard lock(mutex_);
    solutions_.push_back(solution);
    solutions_ = pareto(std::move(solutions_));
  }

  /// Returns the table for a budget and builds it if necessary. Each table
  /// reaches kReachRatio times as far as the one before with the same number of
  /// slots, so that small budgets have finer slots.
  Table table_for(int64_t bytes) const {
    const auto least =
        static_cast<double>(std::max<int64_t>(little_.min_bytes(), 8));
    double reach = least * kFirstReach;
    while (reach < static_cast<double>(bytes)) reach *= kReachRatio;
    const bool is_little =
        reach <= least * kLittleReach || much_.min_bytes() > bytes;
    const Intervals& intervals = is_little ? little_ : much_;
    const int64_t enough =
        intervals.bounds.keep_all_bytes(intervals.bounds.whole());
    const int64_t reach_bytes = std::min(static_cast<int64_t>(reach) + 1,
                                         std::max(largest_bytes_, enough));
    const std::lock_guard lock(mutex_);
    int64_t tables_bytes = 0;
    for (const Table& table : tables_) {
      if (table->reach_bytes() == reach_bytes) return table;
      tables_bytes += table->table_bytes();
    }
    if (tables_bytes + kTableBytes > kAllTablesBytes) tables_.clear();
    tables_.push_back(std::make_shared<const TimeTable>(
        intervals.model, intervals.bounds, reach_bytes, limits_));
    return tables_.back();
  }

  /// Evaluates the table's schedules. In rare cases the model counts tensors
  /// twice that stages pass on; a schedule for more memory may then fit.
  void search(const TimeTable& table, int64_t bytes, Solution& best) const {
    for (const auto between :
         {TimeTable::Between::kLower, TimeTable::Between::kInterpolated}) {
      int64_t asked = bytes;
      for (int tries = passes_tensors_on_ ? 4 : 1; tries > 0; --tries) {
        Solution solution = evaluate(table.ops(asked, between));
        const int64_t peak_bytes = solution.simulation.peak_bytes;
        if (peak_bytes > bytes) break;
        if (better(solution.simulation, best.simulation)) {
          best = std::move(solution);
        }
        asked = std::min(asked + bytes - peak_bytes, table.reach_bytes());
      }
    }
  }

  ChainCosts chain_costs_;
  bool passes_tensors_on_;
  const Intervals little_, much_;  // for small and for large budgets
  detail::TableLimits limits_;
  int64_t smallest_bytes_ = 0, largest_bytes_ = 0;
  mutable std::mutex mutex_;  // guards the members below
  // By ascending memory and descending time.
  mutable std::vector<Solution> solutions_;
  mutable std::vector<Table> tables_;
};

Solver::Solver(ChainCosts chain_costs, const SolverOptions& options) {
  TORCH_CHECK(!chain_costs.stages.empty(),
              "[Solver] expected costs of at least one stage, got none");
  TORCH_CHECK(options.slots >= 0 && options.slots <= (1 << 20),
              "[Solver] expected between 0 and 1048576 slots, got ",
              options.slots);
  impl_ = std::make_unique<Impl>(std::move(chain_costs), options);
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
