#include "distributed/reducer.h"

#include "distributed/bucket_layout.h"
#include "distributed/busy_time.h"
#include "distributed/parameter_shards.h"
#include "plan/exchange_memory.h"
#include "recompute/stage_parameters.h"

#include <c10/util/Exception.h>
#include <torch/types.h>

#include <algorithm>
#include <utility>

namespace reprise {
namespace {

using detail::BucketLayout;
using detail::BucketRules;
using detail::BusyTime;
using detail::ParameterShards;
using Clock = BusyTime::Clock;

/// Frees the memory of a buffer. Threads of the backend may refer to the tensors of an operation
/// for some time after it has finished, and to let go of ours would free it then.
void free_now(torch::Tensor& buffer) {
  if (buffer.defined()) detail::set_storage_memory(buffer, nullptr);
  buffer.reset();
}

/// The same values, for an operation whose threads must not keep their memory alive. The caller
/// does so until the operation has finished. On CUDA, where streams matter, the tensor itself.
torch::Tensor lend(const torch::Tensor& tensor) {
  if (!tensor.is_cpu()) return tensor;
  return torch::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.options());
}

/// The state of one bucket in the current window.
struct BucketInFlight {
  torch::Tensor flat;  // gradients, then their sums
  torch::Tensor sent;  // input and output of the all-to-all
  torch::Tensor received;
  torch::Tensor sum;  // sums of this rank's share
  compat::Work work;
  compat::Work between;  // of `sum`, with those of other groups

  /// After all operations. `with_sums`: also `flat` and `sum`, which otherwise become gradients.
  void free_buffers(bool with_sums) {
    free_now(sent);
    free_now(received);
    if (with_sums) {
      free_now(flat);
      free_now(sum);
    }
    *this = {};
  }
};

}  // namespace

class GradientReducer::Impl {
 public:
  Impl(std::shared_ptr<RankGroup> group,
       const std::vector<Parameter>& parameters, const ReducerOptions& options)
      : group_(std::move(group)), options_(options) {
    auto layout = std::make_shared<const BucketLayout>(
        parameters,
        BucketRules{.bucket_bytes = options.bucket_bytes,
                    .divisor = reduce_scatters() ? group_->size() : 1});
    if (options_.shard) {
      shards_ = std::make_shared<ParameterShards>(group_, layout);
    }
    layout_ = std::move(layout);
    in_flight_.resize(layout_->buckets().size());
  }
  Impl(std::shared_ptr<RankGroup> group,
       std::shared_ptr<ParameterShards> shards, const ReducerOptions& options)
      : group_(std::move(group)),
        options_(options),
        layout_(shards->layout()),
        shards_(std::move(shards)),
        in_flight_(layout_->buckets().size()) {
    options_.shard = true;
  }
  ~Impl() {
    for (const BucketInFlight& bucket_state : in_flight_) {
      if (!bucket_state.work.valid() || bucket_state.work.done()) continue;
      // The operation broke off, and its threads may still write.
      new torch::Tensor(bucket_state.flat);
    }
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void final_from(int stage, bool zeros) {
    const torch::NoGradGuard no_grad;
    while (next_ < in_flight_.size() &&
           layout_->buckets()[next_].ready_stage >= stage) {
      wait_for_room();
      start(next_, zeros);
      ++next_;
    }
  }

  void backward_ended() { ended_ = Clock::now(); }

  torch::Tensor finish(const torch::Tensor& loss) {
    const torch::NoGradGuard no_grad;
    const std::vector<bool> used = reduce_window(loss, /*zeros=*/false);
    for (size_t b = 0; b < in_flight_.size(); ++b) {
      const auto& bucket = layout_->buckets()[b];
      for (size_t i = bucket.first; i < bucket.first + bucket.count; ++i) {
        set_gradient(layout_->entries()[i], used[i], in_flight_[b]);
      }
      if (shards_) shards_->set_gradients(b, in_flight_[b].sum, used);
      in_flight_[b].free_buffers(/*with_sums=*/false);  // gradients
    }
    ++counters_.windows;
    return tail_[0];
  }

  void abandon_window() {
    const torch::NoGradGuard no_grad;
    reduce_window({}, /*zeros=*/true);
    for (BucketInFlight& bucket_state : in_flight_) {
      bucket_state.free_buffers(/*with_sums=*/true);
    }
  }

  void all_gather_parameters() {
    shards().all_gather();
    for (const auto& bucket : layout_->buckets()) {
      ++counters_.gather_calls;
      counters_.gather_bytes += bucket.bytes();
    }
  }

  const BucketLayout& layout() const { return *layout_; }
  ParameterShards& shards() {
    TORCH_CHECK(shards_, "[GradientReducer] expected the option shard");
    return *shards_;
  }
  bool is_sharded() const { return shards_ != nullptr; }
  const Counters& counters() const { return counters_; }
  int64_t started() const { return static_cast<int64_t>(next_); }
  void keep_gradients(bool keep) { keep_ = keep; }

 private:
  RankGroup& everyone() const {
    return options_.everyone ? *options_.everyone : *group_;
  }

  /// Whether gradients are reduced by an all-to-all followed by local sums.
  bool reduce_scatters() const { return options_.shard || options_.bf16; }

  void start(size_t b, bool zeros) {
    const auto& bucket = layout_->buckets()[b];
    BucketInFlight& bucket_state = in_flight_[b];
    bucket_state.flat = torch::empty({bucket.padded}, bucket.options);
    if (zeros) bucket_state.flat.zero_();
    bucket_state.flat.slice(0, bucket.elements).zero_();
    for (size_t i = bucket.first; !zeros && i < bucket.first + bucket.count;
         ++i) {
      const auto& entry = layout_->entries()[i];
      torch::Tensor tensor = entry.parameter.tensor;
      torch::Tensor& gradient = tensor.mutable_grad();
      torch::Tensor slot = BucketLayout::view_of(entry, bucket_state.flat);
      if (!gradient.defined()) {
        slot.zero_();
        continue;
      }
      TORCH_CHECK(gradient.layout() == torch::kStrided,
                  "[GradientReducer] expected dense gradients, got ",
                  gradient.layout(), " of '", entry.parameter.name, "'");
      slot.copy_(gradient);
      defined_.push_back(i);
      if (!keep_) gradient.reset();
    }
    const auto begin = Clock::now();
    if (!reduce_scatters()) {
      bucket_state.work = group_->all_reduce(lend(bucket_state.flat));
      note(bucket_state.work, begin, bucket.bytes());
      return;
    }
    bucket_state.sent = options_.bf16 ? bucket_state.flat.to(torch::kBFloat16)
                                      : bucket_state.flat;
    bucket_state.flat.reset();
    bucket_state.received = torch::empty_like(bucket_state.sent);
    bucket_state.work =
        group_->all_to_all(bucket_state.received, bucket_state.sent);
    note(bucket_state.work, begin,
         static_cast<int64_t>(bucket_state.sent.nbytes()));
  }

  void note(compat::Work& work, Clock::time_point begin, int64_t bytes) {
    if (bytes > 0) {
      ++counters_.calls;
      counters_.bytes += bytes;
    }
    work.when_done([busy_time = busy_time_, begin] {
      busy_time->note(begin, Clock::now());
    });
  }

  /// Waits until another bucket may start.
  void wait_for_room() {
    if (options_.most_in_flight == 0 || !reduce_scatters()) return;
    const auto most = static_cast<size_t>(options_.most_in_flight);
    for (size_t b = 0; b + most <= next_; ++b) {
      if (in_flight_[b].received.defined() && !in_flight_[b].sum.defined()) {
        sum_bucket(b);
      }
    }
  }

  void sum_bucket(size_t b) {
    BucketInFlight& bucket_state = in_flight_[b];
    group_->wait(bucket_state.work);
    const auto shares = bucket_state.received.chunk(group_->size());
    torch::Tensor sum =
        torch::empty(shares[0].sizes(), layout_->buckets()[b].options);
    sum.copy_(shares[0]);
    for (size_t r = 1; r < shares.size(); ++r) sum.add_(shares[r]);
    bucket_state.sum = std::move(sum);
    if (!options_.shard) return;  // the buffers are reused by all_gather_sums()
    bucket_state.work = {};
    free_now(bucket_state.sent);
    free_now(bucket_state.received);
    if (!options_.replicas) return;
    const auto begin = Clock::now();
    bucket_state.between = options_.replicas->all_reduce(bucket_state.sum);
    note(bucket_state.between, begin, 0);
    counters_.replica_bytes += static_cast<int64_t>(bucket_state.sum.nbytes());
  }

  /// Starts the remaining buckets and waits for all. Returns which entries have a
  /// gradient on any rank. May be called again if it threw: no collective starts twice.
  std::vector<bool> reduce_window(const torch::Tensor& loss, bool zeros) {
    if (ended_ == Clock::time_point{}) ended_ = Clock::now();
    for (; next_ < in_flight_.size(); ++next_) {
      wait_for_room();
      start(next_, zeros);
    }
    const size_t entries = layout_->entries().size();
    const bool all_here = defined_.size() == entries;
    if (!tail_work_.valid()) start_tail(loss);
    for (size_t b = 0; b < in_flight_.size(); ++b) {
      BucketInFlight& bucket_state = in_flight_[b];
      if (bucket_state.received.defined() && !bucket_state.sum.defined())
        sum_bucket(b);
      if (!reduce_scatters()) group_->wait(bucket_state.work);
    }
    for (BucketInFlight& bucket_state : in_flight_) {
      if (!bucket_state.between.valid()) continue;
      options_.replicas->wait(bucket_state.between);
    }
    if (options_.bf16 && !options_.shard) all_gather_sums();
    everyone().wait(tail_work_);
    const auto [busy, exposed] = busy_time_->take(ended_);
    counters_.busy_s += busy;
    counters_.exposed_s += exposed;
    ended_ = {};
    tail_work_ = {};
    next_ = back_ = 0;
    defined_.clear();
    std::vector<bool> used(entries, true);
    if (all_here) return used;  // avoids a device synchronization
    const torch::Tensor counts = tail_.cpu();
    const double* at = counts.data_ptr<double>() + 1;
    for (size_t i = 0; i < used.size(); ++i) used[i] = at[i] > 0;
    return used;
  }

  void start_tail(const torch::Tensor& loss) {
    std::vector<double> tail(layout_->entries().size() + 1, 0.0);
    for (const size_t i : defined_) tail[i + 1] = 1;
    tail_ = torch::tensor(tail, torch::kDouble)
                .to(layout_->buckets()[0].options.device());
    if (loss.defined()) tail_[0].copy_(loss);
    tail_work_ = everyone().all_reduce(tail_);
  }

  /// Sends the rounded sums to all ranks, using the buffers of the all-to-all.
  void all_gather_sums() {
    for (; back_ < in_flight_.size(); ++back_) {
      BucketInFlight& bucket_state = in_flight_[back_];
      const auto begin = Clock::now();
      const torch::Tensor own =
          bucket_state.sent.slice(0, 0, bucket_state.sum.numel());
      own.copy_(bucket_state.sum);
      bucket_state.work = group_->all_gather(bucket_state.received, own);
      note(bucket_state.work, begin, 0);
    }
    for (size_t b = 0; b < in_flight_.size(); ++b) {
      BucketInFlight& bucket_state = in_flight_[b];
      group_->wait(bucket_state.work);
      if (!bucket_state.flat.defined()) {
        bucket_state.flat =
            bucket_state.received.to(layout_->buckets()[b].options.dtype());
      }
      bucket_state.sum.reset();
    }
  }

  void set_gradient(const BucketLayout::Entry& entry, bool used,
                    const BucketInFlight& bucket_state) {
    torch::Tensor tensor = entry.parameter.tensor;
    torch::Tensor& gradient = tensor.mutable_grad();
    if (options_.shard) {
      if (!keep_) gradient.reset();
      return;
    }
    if (!used) return;
    const torch::Tensor sum = BucketLayout::view_of(entry, bucket_state.flat);
    if (keep_ && gradient.defined()) {
      gradient.copy_(sum);
    } else {
      gradient = sum;
    }
  }

  std::shared_ptr<RankGroup> group_;
  ReducerOptions options_;
  std::shared_ptr<const BucketLayout> layout_;
  std::shared_ptr<ParameterShards> shards_;  // null without `shard`
  bool keep_ = false;
  Counters counters_;
  std::vector<BucketInFlight> in_flight_;  // one per bucket
  std::shared_ptr<BusyTime> busy_time_ = std::make_shared<BusyTime>();
  size_t next_ = 0;              // next bucket to start
  std::vector<size_t> defined_;  // entries with a gradient on this rank
  torch::Tensor tail_;  // loss, then the ranks that have a gradient, per entry
  compat::Work tail_work_;
  size_t back_ = 0;  // next bucket for all_gather_sums()
  Clock::time_point ended_{};
};

GradientReducer::GradientReducer(std::shared_ptr<RankGroup> group,
                                 const std::vector<Parameter>& parameters,
                                 const ReducerOptions& options)
    : impl_(std::make_unique<Impl>(std::move(group), parameters, options)) {}
GradientReducer::GradientReducer(
    std::shared_ptr<RankGroup> group,
    std::shared_ptr<detail::ParameterShards> shards,
    const ReducerOptions& options)
    : impl_(std::make_unique<Impl>(std::move(group), std::move(shards),
                                   options)) {}
GradientReducer::~GradientReducer() = default;

const std::vector<int>& GradientReducer::cuts() const {
  return impl_->layout().cuts();
}
void GradientReducer::final_from(int stage) {
  impl_->final_from(stage, /*zeros=*/false);
}
void GradientReducer::backward_ended() {
  impl_->backward_ended();
}
torch::Tensor GradientReducer::finish(const torch::Tensor& loss) {
  return impl_->finish(loss);
}
void GradientReducer::abandon_window() {
  impl_->abandon_window();
}
void GradientReducer::abandon_from(int stage) {
  impl_->final_from(stage, /*zeros=*/true);
}
void GradientReducer::keep_gradients(bool keep) {
  impl_->keep_gradients(keep);
}
const GradientReducer::NamedList& GradientReducer::shards() const {
  static const NamedList none;
  return impl_->is_sharded() ? impl_->shards().list() : none;
}
void GradientReducer::reserve_gather() {
  impl_->shards().reserve_gather();
}
void GradientReducer::all_gather_parameters() {
  impl_->all_gather_parameters();
}
GradientReducer::NamedList GradientReducer::gather_full(
    const NamedList& shard_values, const std::vector<std::string>& prefixes) {
  return impl_->shards().gather_full(shard_values, prefixes);
}
GradientReducer::NamedList GradientReducer::select_shards(
    const NamedList& full, const std::vector<std::string>& prefixes) const {
  return impl_->shards().select_shards(full, prefixes);
}
const detail::ParameterShards* GradientReducer::parameter_shards() const {
  return impl_->is_sharded() ? &impl_->shards() : nullptr;
}
int64_t GradientReducer::gradient_bytes() const {
  int64_t bytes = 0;
  for (const auto& bucket : impl_->layout().buckets()) bytes += bucket.bytes();
  return bytes;
}
int64_t GradientReducer::buckets() const {
  return static_cast<int64_t>(impl_->layout().buckets().size());
}
std::vector<detail::SentBucket> GradientReducer::sent_buckets() const {
  std::vector<detail::SentBucket> list;
  const BucketLayout& layout = impl_->layout();
  for (const auto& bucket : layout.buckets()) {
    detail::SentBucket sent{0, bucket.bytes(), bucket.ready_stage};
    for (size_t i = bucket.first; i < bucket.first + bucket.count; ++i) {
      const torch::Tensor& tensor = layout.entries()[i].parameter.tensor;
      sent.gradient_bytes += static_cast<int64_t>(tensor.nbytes());
    }
    list.push_back(sent);
  }
  return list;
}
const GradientReducer::Counters& GradientReducer::counters() const {
  return impl_->counters();
}
int64_t GradientReducer::started() const {
  return impl_->started();
}

}  // namespace reprise
