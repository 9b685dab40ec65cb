#include "distributed/sync_batch_norm.h"

#include <c10/util/Exception.h>

#include <utility>

namespace reprise {

SyncBatchNormGroup::SyncBatchNormGroup(std::shared_ptr<RankGroup> group,
                                       int64_t max_channels)
    : group_(std::move(group)),
      row_(torch::zeros({2 * max_channels + 2}, torch::kDouble)),
      table_(torch::zeros({group_->size(), row_.numel()}, torch::kDouble)) {}

torch::Tensor SyncBatchNormGroup::gather(const torch::Tensor& own) {
  TORCH_CHECK(
      open_,
      "[SyncBatchNormGroup] expected an open window; call open() before "
      "its first micro-batch");
  TORCH_CHECK(own.numel() < row_.numel(),
              "[SyncBatchNormGroup] expected at most ", row_.numel() - 1,
              " values, got ", own.numel());
  row_.narrow(0, 1, own.numel()).copy_(own);
  return exchange(false).narrow(1, 1, own.numel()).clone();
}

torch::Tensor SyncBatchNormGroup::exchange(bool failed) {
  row_.data_ptr<double>()[0] = failed ? 1.0 : 0.0;  // allocates no memory
  group_->gather(row_, table_);
  ++calls_;
  const double* flags = table_.data_ptr<double>();
  for (int rank = 0; rank < group_->size() && !failed; ++rank) {
    if (flags[rank * row_.numel()] == 0) continue;
    open_ = false;
    failed_elsewhere_ = true;
    TORCH_CHECK(false, "[SyncBatchNormGroup] rank ", rank, " has failed");
  }
  return table_;
}

void SyncBatchNormGroup::open() {
  open_ = true;
  failed_elsewhere_ = false;
}

void SyncBatchNormGroup::close() {
  exchange(false);
  open_ = false;
}

void SyncBatchNormGroup::fail() {
  if (!std::exchange(open_, false)) return;
  exchange(true);
}

}  // namespace reprise
