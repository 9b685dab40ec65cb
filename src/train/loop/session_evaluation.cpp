// A session's evaluations on the test split.
#include "train/loop/session.h"

#include <fmt/format.h>

#include <algorithm>

namespace reprise::detail {
namespace {

/// While it lives; whatever ends it, training mode comes back.
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

bool Session::evaluates() const {
  // Random data has nothing to learn, so only on request.
  return config_.evaluate &&
         (!config_.is_random_data() || config_.eval_every > 0);
}

void Session::evaluate_if_due() {
  if (!evaluates()) return;
  const bool epoch_ends = loader_->epoch_ends();
  const bool due = config_.eval_every > 0
                       ? state_.step % config_.eval_every == 0
                       : epoch_ends;
  if (due || at_end()) evaluate();
}

void Session::evaluate() {
  if (evaluated_at_ == state_.step) return;
  tell_training(false);
  const auto start = Clock::now();
  // A plan counts the batches that one loader reads ahead, not those of two.
  waited_s_ += loader_->waited_s();
  loader_.reset();
  int64_t batch = config_.batch;
  bool again = false;
  // BatchNorm's statistics are each rank's own; those of the first one count.
  if (group_) group_->broadcast(model_.root->buffers());
  Tested tested;
  oom_retry_.run(
      fmt::format("the evaluation after update {}", state_.step),
      [&] { tested = evaluate_once(batch); },
      [&] {
        // Once as it is, since another size rounds otherwise; then smaller.
        if (again) batch = std::max<int64_t>(batch / 2, 1);
        again = true;
      });
  if (group_) {
    const auto all =
        group_->all_reduce_sum({tested.loss, tested.right, tested.count});
    tested = {all[0], all[1], all[2], true};
  }
  state_.evaluation_due = !tested.whole;
  if (tested.whole) {
    const TrainListener::Evaluation found{
        state_.step, tested.loss / tested.count, tested.right / tested.count};
    oom_retry_.run("fetching the losses", [&] { metrics_->add(found); });
    evaluation_ = found;
    if (run_.listener != nullptr) run_.listener->evaluated(found);
  }
  evaluated_at_ = state_.step;
  open_loader();
  aside_s_ += std::chrono::duration<double>(Clock::now() - start).count();
  tell_training(true);
}

Session::Tested Session::evaluate_once(int64_t batch_size) {
  LoaderOptions loading;
  loading.batch = batch_size;
  if (group_ && test_data_->size() >= group_->size()) {
    loading.window = batch_size * group_->size();
    loading.share = group_->rank();
    loading.shares = group_->size();
  } else if (group_ && group_->rank() > 0) {
    return {};  // less than a sample for each
  }
  loading.shuffle = false;
  loading.workers = config_.workers;
  Loader loader(test_data_, loading);
  const torch::NoGradGuard no_grad;
  const compat::AutocastGuard autocast(autocast_);
  const EvaluationMode mode(*model_.root);
  torch::Tensor loss =
      torch::zeros({}, torch::dtype(torch::kDouble).device(device_));
  torch::Tensor right = loss.clone();
  double count = 0;
  while (auto batch = loader.next()) {
    move_to(*batch, device_);
    prepare(*batch, prepare_);
    const Tensors outputs = execution_.forward({batch->inputs, batch->targets});
    loss += outputs[0];
    right += outputs[1];
    count += static_cast<double>(batch->count);
    if (!group_ && told_to_stop()) return {.whole = false};
  }
  return {loss.item<double>(), right.item<double>(), count, true};
}

}  // namespace reprise::detail
