#include "train/store/metrics.h"

#include <reprise/base/error.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cmath>

namespace reprise::detail {
namespace {

using nlohmann::ordered_json;

/// Returns `value`, or its text if it is not finite, which JSON cannot
/// represent.
ordered_json number(double value) {
  return std::isfinite(value) ? ordered_json(value)
                              : ordered_json(fmt::format("{}", value));
}

}  // namespace

Metrics::Metrics(const RunDirectory* directory, int64_t keep_bytes,
                 const std::string& tensorboard, TrainListener* listener,
                 torch::Device device)
    : listener_(listener),
      values_(torch::zeros({kMostPending, 2},
                           torch::dtype(torch::kDouble).device(device))) {
  if (directory != nullptr) {
    log_.emplace(directory->metrics_path(), keep_bytes);
    if (log_->missing_bytes() > 0) {
      warn(fmt::format(
          "expected {} bytes in {}, found {}: metrics of updates "
          "before the saved state are lost; the training is not "
          "affected",
          keep_bytes, log_->path(), keep_bytes - log_->missing_bytes()));
    }
  }
  if (!tensorboard.empty()) {
    events_ = std::make_unique<EventWriter>(tensorboard);
  }
}

void Metrics::add(int64_t step, const torch::Tensor& loss,
                  const torch::Tensor& norm, double rate, int64_t samples) {
  TORCH_INTERNAL_ASSERT(!full());
  const torch::Tensor row = values_[std::ssize(pending_)];
  row[0].copy_(loss, /*non_blocking=*/true);
  if (norm.defined()) row[1].copy_(norm, /*non_blocking=*/true);
  pending_.push_back({step, norm.defined(), rate, samples});
}

void Metrics::add(const TrainListener::Evaluation& evaluation) {
  flush();
  ordered_json line = {{"step", evaluation.step},
                       {"eval_loss", number(evaluation.loss)}};
  for (const auto& [name, value] : evaluation.metrics) {
    line["eval_" + name] = number(value);
  }
  write(line.dump());
  write_events([&](EventWriter& events) {
    events.scalar("eval/loss", evaluation.loss, evaluation.step);
    for (const auto& [name, value] : evaluation.metrics) {
      events.scalar("eval/" + name, value, evaluation.step);
    }
  });
}

void Metrics::flush() {
  finish_copying();
  if (pending_.empty()) return;
  const torch::Tensor values = values_.narrow(0, 0, std::ssize(pending_)).cpu();
  write(pending_, values);
  pending_.clear();
}

void Metrics::collect() {
  if (!values_.is_cuda()) return flush();
  finish_copying();
  if (pending_.empty()) return;
  if (!copied_.defined()) {
    copied_ = torch::empty(values_.sizes(),
                           torch::dtype(torch::kDouble).pinned_memory(true));
  }
  const int64_t count = std::ssize(pending_);
  // Later updates write to the same rows, on the same stream.
  copied_.narrow(0, 0, count)
      .copy_(values_.narrow(0, 0, count), /*non_blocking=*/true);
  copying_.emplace(Copying{std::move(pending_),
                           compat::CudaEvent(values_.device().index())});
  pending_.clear();
}

void Metrics::finish_copying() {
  if (!copying_) return;
  copying_->end.synchronize();
  write(copying_->pending, copied_);
  copying_.reset();
}

void Metrics::write(const std::vector<Pending>& pending,
                    const torch::Tensor& values) {
  const double* at = values.data_ptr<double>();
  for (const Pending& p : pending) {
    const double loss = *at++;
    const double norm = *at++;
    ordered_json line = {{"step", p.step},
                         {"loss", number(loss)},
                         {"lr", p.rate},
                         {"samples", p.samples}};
    if (p.has_norm) line["norm"] = number(norm);
    write(line.dump());
    write_events([&](EventWriter& events) {
      events.scalar("train/loss", loss, p.step);
      events.scalar("train/lr", p.rate, p.step);
      if (p.has_norm) events.scalar("train/norm", norm, p.step);
    });
    last_loss_ = loss;
    if (!std::isfinite(loss) && !warned_of_loss_) {
      warned_of_loss_ = true;
      warn(fmt::format("the loss of update {} is {}", p.step, loss));
    }
  }
}

int64_t Metrics::synced_bytes() {
  if (!log_) return 0;
  guard(warned_of_sync_, [&] { log_->sync(); });
  return log_->bytes();
}

void Metrics::write(const std::string& line) {
  if (!log_) return;
  guard(warned_of_log_, [&] { log_->write(line); });
}

void Metrics::write_events(const std::function<void(EventWriter&)>& values) {
  if (!events_) return;
  guard(warned_of_events_, [&] { values(*events_); });
}

void Metrics::guard(bool& warned, const std::function<void()>& writing) {
  try {
    writing();
    warned = false;
  } catch (const Error& error) {
    if (!warned) warn(error.what());
    warned = true;
  }
}

void Metrics::warn(const std::string& text) {
  if (listener_ != nullptr) listener_->warned(text);
}

}  // namespace reprise::detail
