#include "train/loop/train_loop.h"

#include <reprise/train/trainer.h>

#include <atomic>
#include <utility>

namespace reprise {

namespace {

TrainOptions resolved(TrainOptions options) {
  options.resolve();
  return options;
}

}  // namespace

Trainer::Trainer(TrainInputs inputs, const TrainOptions& options,
                 TrainerOptions with)
    : loop_(std::make_unique<detail::TrainLoop>(
          detail::make_setup(std::move(inputs), resolved(options)),
          std::move(with))) {}

Trainer::Trainer(Model model, std::shared_ptr<const Dataset> data,
                 const TrainOptions& options, TrainerOptions with)
    : Trainer(TrainInputs{std::move(model),
                          {.name = "own data", .train = std::move(data)}},
              options, std::move(with)) {}

Trainer::~Trainer() = default;
Trainer::Trainer(Trainer&&) noexcept = default;
Trainer& Trainer::operator=(Trainer&&) noexcept = default;

const Model& Trainer::model() const {
  return loop_->model();
}

TrainResult Trainer::run(const TrainRun& run) {
  static std::atomic<bool> running{false};
  TORCH_CHECK(!running.exchange(true),
              "[Trainer] expected one training at a time in this process, got "
              "two; random generators, memory counts and library settings "
              "belong to the process: train one model after the other, or in "
              "two processes");
  struct Ended {
    ~Ended() { running = false; }
  } const ended;
  return loop_->run(run);
}

std::vector<double> Trainer::window_ms() const {
  return loop_->window_ms();
}

}  // namespace reprise
