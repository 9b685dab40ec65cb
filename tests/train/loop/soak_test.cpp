// Trainings one after another in one process, and one long training: planned within a budget,
// with evaluations, saves, failed allocations that plan again, and resumes. Memory,
// descriptors and threads must stay the same. REPRISE_SOAK_HOURS runs both for that time
// together instead of a few seconds. The slopes are printed.
#include "train/runs.h"

#include <reprise/memory/meter.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <random>

namespace reprise::testing {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kWarmUpCycles = 6;

double hours_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::ratio<3600>>(Clock::now() - begin)
      .count();
}

/// What a process holds at one moment.
struct Sample {
  double hours = 0;
  double rss = 0;  ///< bytes
  double files = 0, threads = 0;
};

double entries_of(const char* folder) {
  const std::filesystem::directory_iterator list(folder);
  return static_cast<double>(std::distance(begin(list), end(list)));
}

Sample sample(Clock::time_point begin) {
  return {hours_since(begin), static_cast<double>(process_memory().rss),
          entries_of("/proc/self/fd"), entries_of("/proc/self/task")};
}

/// Least squares over the samples, per hour.
double slope(const std::vector<Sample>& samples, double Sample::*value) {
  double n = 0, x = 0, y = 0, xx = 0, xy = 0;
  for (const Sample& s : samples) {
    ++n;
    x += s.hours;
    y += s.*value;
    xx += s.hours * s.hours;
    xy += s.hours * s.*value;
  }
  const double spread = n * xx - x * x;
  return spread > 0 ? (n * xy - x * y) / spread : 0;
}

double largest(const std::vector<Sample>& samples, double Sample::*value) {
  double most = 0;
  for (const Sample& s : samples) most = std::max(most, s.*value);
  return most;
}

/// Hours for each of the two tests; 0: a few seconds.
double hours_to_run() {
  const char* text = std::getenv("REPRISE_SOAK_HOURS");
  return text == nullptr ? 0 : std::atof(text) / 2;
}

struct Counts : Warnings {
  void updated(int64_t) override { ++windows; }
  void evaluated(const Evaluation&) override { ++evaluations; }
  void saved(const std::string&) override { ++saves; }
  int64_t windows = 0, evaluations = 0, saves = 0, trainings = 0;
  int64_t failures = 0;  ///< injected and survived
  int64_t replans = 0;
};

/// Fails if the process holds more and more, and prints the slopes.
void expect_flat(std::vector<Sample> samples, double hours,
                 const Counts& counts) {
  // The first quarter grows the pools of allocator and threads.
  samples.erase(samples.begin(),
                samples.begin() + static_cast<int64_t>(samples.size() / 4));
  ASSERT_GT(samples.size(), 4);
  const Sample& first = samples.front();
  EXPECT_EQ(largest(samples, &Sample::files), first.files);
  EXPECT_EQ(largest(samples, &Sample::threads), first.threads);
  const double memory = slope(samples, &Sample::rss);
  if (hours > 0) {
    // Less than one percent per hour is the allocator's.
    EXPECT_LT(memory, 0.01 * first.rss);
  }
  EXPECT_LT(largest(samples, &Sample::rss), 1.1 * first.rss);
  if (device().is_cpu()) {
    EXPECT_GT(counts.failures, 0);
    EXPECT_GT(counts.replans, 0);
  }
  std::printf(
      "soak: %.2f hours, %lld trainings, %lld windows, %lld evaluations, %lld "
      "saves, %lld failed allocations, %lld plans again; per hour: memory "
      "%+.2f MiB (of %.0f), descriptors %+.3f (of %.0f), threads %+.3f (of "
      "%.0f)\n",
      samples.back().hours, static_cast<long long>(counts.trainings),
      static_cast<long long>(counts.windows),
      static_cast<long long>(counts.evaluations),
      static_cast<long long>(counts.saves),
      static_cast<long long>(counts.failures),
      static_cast<long long>(counts.replans), memory / (1 << 20),
      first.rss / (1 << 20), slope(samples, &Sample::files), first.files,
      slope(samples, &Sample::threads), first.threads);
}

TrainConfig config_of_cycle(int64_t cycle) {
  TrainConfig config = small(cycle % 3 == 0   ? "mlp"
                             : cycle % 3 == 1 ? "cnn-basic"
                                              : "gpt2");
  ModelOptions& m = config.model_options;
  if (config.model == "cnn-basic") m.image_size = 28;
  if (config.model == "gpt2") {
    m.depth = 2;
    m.width = 16;
    m.heads = 2;
    m.vocab = 24;
    m.seq = 6;
  }
  config.batch = config.accumulate = 0;
  config.global_batch = 8;
  config.memory_limit = enough_memory();
  config.epochs = 0;
  config.steps = 30;
  config.evaluate = true;
  config.eval_every = 7;
  config.save_every = 5;
  config.threads = 1;
  config.update = UpdateMode::kAfter;
  config.resolve();
  return config;
}

/// Plans a training, stops it, resumes it, and lets allocations fail in both parts.
void train_once(int64_t cycle, std::mt19937& random, Counts& counts) {
  const TrainConfig config = config_of_cycle(cycle);
  const TemporaryDirectory base;
  for (const bool resume : {false, true}) {
    auto directory =
        resume ? RunDirectory::open(base.path() + "/run")
               : RunDirectory::create(base.path() + "/run", to_json(config));
    Trainer trainer(make_inputs(config), config);
    int64_t left = 12;
    TrainRun how;
    how.directory = &directory;
    how.resume = resume;
    how.listener = &counts;
    how.stop = [&] { return !resume && --left == 0; };
    const bool injects = device().is_cpu();
    std::optional<AllocationFailure> failure;
    if (injects) failure.emplace(static_cast<int64_t>(200 + random() % 4000));
    const TrainResult result = trainer.run(how);
    counts.replans += result.summary.replans;
    if (injects && failure->happened()) ++counts.failures;
  }
  ++counts.trainings;
  counts.list.clear();
}

TEST(Soak, HoldsNothingBetweenTrainings) {
  const double hours = hours_to_run();
  std::mt19937 random(1);
  Counts counts;
  std::map<int64_t, int64_t> live;  // by kind of training
  std::vector<Sample> samples;
  const auto begin = Clock::now();
  for (int64_t cycle = 0;
       cycle < 2 * kWarmUpCycles || hours_since(begin) < hours; ++cycle) {
    train_once(cycle, random, counts);
    const int64_t now = live_bytes(device());
    if (cycle < kWarmUpCycles) {
      live[cycle % 3] = now;
      continue;
    }
    ASSERT_EQ(now, live[cycle % 3]) << "training " << cycle;
    samples.push_back(sample(begin));
  }
  EXPECT_GT(counts.evaluations, counts.trainings);
  EXPECT_GT(counts.saves, counts.trainings);
  expect_flat(std::move(samples), hours, counts);
}

/// Takes samples within a training, and lets an allocation fail now and then.
struct LongTraining : Counts {
  static constexpr int64_t kBetweenSamples = 100, kBetweenFailures = 250;

  void updated(int64_t step) override {
    Counts::updated(step);
    if (step % kBetweenSamples == 0) samples.push_back(sample(begin));
    if (device().is_cpu() && step % kBetweenFailures == 0) {
      count_failure();
      failure.emplace(static_cast<int64_t>(random() % 500));
    }
    list.clear();
  }
  void count_failure() {
    if (failure && failure->happened()) ++failures;
    failure.reset();
  }

  Clock::time_point begin = Clock::now();
  std::mt19937 random{2};
  std::optional<AllocationFailure> failure;
  std::vector<Sample> samples;
};

TEST(Soak, HoldsNothingWithinATraining) {
  const double hours = hours_to_run();
  TrainConfig config = config_of_cycle(2);
  config.steps = 1'000'000'000;
  config.eval_every = 40;
  config.save_every = 60;
  const TemporaryDirectory base;
  auto directory = RunDirectory::create(base.path() + "/run", to_json(config));
  Trainer trainer(make_inputs(config), config);
  LongTraining counts;
  TrainRun how;
  how.directory = &directory;
  how.listener = &counts;
  how.stop = [&] {
    return counts.windows >= 1500 && hours_since(counts.begin) >= hours;
  };
  const TrainResult result = trainer.run(how);
  counts.count_failure();
  counts.replans = result.summary.replans;
  counts.trainings = 1;
  EXPECT_EQ(counts.evaluations, counts.windows / 40);
  EXPECT_GE(counts.saves, counts.windows / 60);
  expect_flat(std::move(counts.samples), hours, counts);
}

}  // namespace
}  // namespace reprise::testing
