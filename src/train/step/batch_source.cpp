#include "train/step/batch_source.h"

#include <c10/util/Exception.h>

#include <utility>

namespace reprise::detail {

BatchSource::BatchSource(const TrainSetup& setup, const Ranks& ranks)
    : setup_(setup), ranks_(ranks) {}

void BatchSource::open(const LoaderPosition& position) {
  close();
  LoaderOptions options = make_loader_options(setup_);
  options.batch = setup_.options.batch;
  options.window = setup_.options.global_batch;
  options.shard = ranks_.rank();
  options.num_shards = ranks_.size();
  loader_ = std::make_unique<Loader>(setup_.data.train, options, position);
}

void BatchSource::close() {
  waited_before_s_ = waited_s();
  loader_.reset();
}

const Batch& BatchSource::next() {
  auto batch = loader_->next();
  TORCH_INTERNAL_ASSERT(batch.has_value());
  current_ = std::move(*batch);
  types_.check(current_);
  move_to(current_, setup_.device);
  prepare_batch(setup_, current_);
  return current_;
}

Batch BatchSource::any_sample() const {
  Batch batch = largest_batch(*setup_.data.train, 1);
  move_to(batch, setup_.device);
  prepare_batch(setup_, batch);
  return batch;
}

Loader::Window BatchSource::window_ahead() {
  while (loader_->epoch_done()) loader_->next();
  return loader_->window_ahead();
}

double BatchSource::waited_s() const {
  return waited_before_s_ + (loader_ ? loader_->waited_s() : 0);
}

}  // namespace reprise::detail
