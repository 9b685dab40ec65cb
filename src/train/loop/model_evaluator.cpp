#include "train/loop/model_evaluator.h"

#include <reprise/data/loader.h>

#include <fmt/format.h>

#include <algorithm>

namespace reprise::detail {
namespace {

/// Sets evaluation mode during its lifetime and training mode afterwards.
class EvaluationMode {
 public:
  explicit EvaluationMode(torch::nn::Module& module) : module_(module) {
    module_.eval();
  }
  ~EvaluationMode() { module_.train(); }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  torch::nn::Module& module_;
};

}  // namespace

std::optional<ModelEvaluator::Result> ModelEvaluator::run(
    int64_t step, const std::function<bool()>& stop) {
  int64_t batch = setup_.options.batch;
  bool repeated = false;
  // Without synchronized BatchNorm, ranks have different statistics; use those
  // of rank 0.
  ranks_.broadcast(setup_.model.root->buffers());
  Sums sums;
  const auto restore = [&] {
    // First repeat with the same size, because another size rounds differently.
    if (repeated) batch = std::max<int64_t>(batch / 2, 1);
    repeated = true;
  };
  OomRetry::Recovery recovery;
  recovery.restore = restore;
  retry_.run(
      fmt::format("the evaluation after update {}", step),
      [&] { sums = run_once(batch, stop); }, recovery);
  if (!sums.complete) return std::nullopt;
  std::vector<double> all = sums.outputs;
  all.push_back(sums.count);
  all = ranks_.all_reduce_sum(all);
  Result result{all.front() / all.back(), {}};
  const auto& names = setup_.model.metrics;
  for (size_t i = 0; i < names.size(); ++i) {
    result.metrics[names[i]] = all[i + 1] / all.back();
  }
  return result;
}

ModelEvaluator::Sums ModelEvaluator::run_once(
    int64_t batch_size, const std::function<bool()>& stop) {
  LoaderOptions options;
  options.batch = batch_size;
  bool has_samples = true;
  if (ranks_.size() > 1 && setup_.data.test->size() >= ranks_.size()) {
    options.window = batch_size * ranks_.size();
    options.shard = ranks_.rank();
    options.num_shards = ranks_.size();
  } else if (!ranks_.first()) {
    has_samples = false;  // less than one sample per rank
  }
  options.shuffle = false;
  options.workers = setup_.options.workers;
  std::optional<Loader> loader;
  if (has_samples) loader.emplace(setup_.data.test, options);
  const torch::NoGradGuard no_grad;
  const EvaluationMode mode(*setup_.model.root);
  const size_t expected = 1 + setup_.model.metrics.size();
  torch::Tensor sums =
      torch::zeros({static_cast<int64_t>(expected)},
                   torch::dtype(torch::kDouble).device(setup_.device));
  double count = 0;
  const auto add = [&](Batch& batch) {
    move_to(batch, setup_.device);
    prepare_batch(setup_, batch);
    const Tensors outputs = runner_.forward(batch);
    TORCH_CHECK(
        outputs.size() == expected, "[Trainer] expected ", expected,
        " outputs of the chain in evaluation mode, the sums of the loss "
        "and of Model::metrics, got ",
        outputs.size());
    for (size_t i = 0; i < expected; ++i) {
      sums[static_cast<int64_t>(i)] += outputs[i];
    }
    count += static_cast<double>(batch.count);
  };
  const auto next = [&] { return loader ? loader->next() : std::nullopt; };
  if (setup_.sharded) {
    run_in_step(next, add);
  } else {
    while (auto batch = next()) {
      add(*batch);
      if (ranks_.can_stop_in_window() && stop && stop()) {
        return {.complete = false};
      }
    }
  }
  const torch::Tensor host = sums.cpu();
  const double* values = host.data_ptr<double>();
  return {{values, values + expected}, count, true};
}

void ModelEvaluator::run_in_step(
    const std::function<std::optional<Batch>()>& next,
    const std::function<void(Batch&)>& add) {
  std::optional<std::string> failure;
  bool more = true;  // after the last batch, a loader begins anew
  while (true) {
    std::optional<Batch> batch;
    if (more && !failure) failure = out_of_memory_in([&] { batch = next(); });
    more = batch.has_value();
    if (!ranks_.any(batch.has_value())) break;
    if (batch && !failure) failure = out_of_memory_in([&] { add(*batch); });
    // Stages that this rank has not run are gathered for the others.
    setup_.sharded->finish_forward_without_computing();
  }
  TORCH_CHECK_WITH(OutOfMemoryError, !ranks_.any(failure.has_value()),
                   failure.value_or("another rank has no memory"));
}

}  // namespace reprise::detail
