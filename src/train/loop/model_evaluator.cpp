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
  const auto all = ranks_.all_reduce_sum({sums.loss, sums.right, sums.count});
  return Result{all[0] / all[2], all[1] / all[2]};
}

ModelEvaluator::Sums ModelEvaluator::run_once(
    int64_t batch_size, const std::function<bool()>& stop) {
  LoaderOptions options;
  options.batch = batch_size;
  if (ranks_.size() > 1 && setup_.data.test->size() >= ranks_.size()) {
    options.window = batch_size * ranks_.size();
    options.shard = ranks_.rank();
    options.num_shards = ranks_.size();
  } else if (!ranks_.first()) {
    return {};  // less than one sample per rank
  }
  options.shuffle = false;
  options.workers = setup_.options.workers;
  Loader loader(setup_.data.test, options);
  const torch::NoGradGuard no_grad;
  const EvaluationMode mode(*setup_.model.root);
  torch::Tensor loss =
      torch::zeros({}, torch::dtype(torch::kDouble).device(setup_.device));
  torch::Tensor right = loss.clone();
  double count = 0;
  while (auto batch = loader.next()) {
    move_to(*batch, setup_.device);
    prepare_batch(setup_, *batch);
    const Tensors outputs = runner_.forward(*batch);
    loss += outputs[0];
    right += outputs[1];
    count += static_cast<double>(batch->count);
    if (ranks_.can_stop_in_window() && stop && stop()) {
      return {.complete = false};
    }
  }
  return {loss.item<double>(), right.item<double>(), count, true};
}

}  // namespace reprise::detail
