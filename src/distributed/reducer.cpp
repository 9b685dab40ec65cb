#include "distributed/bucket_layout.h"
#include "distributed/pieces.h"
#include "distributed/timeline.h"

#include <reprise/distributed/reducer.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace reprise {
namespace {

using detail::BucketLayout;
using detail::Pieces;
using detail::Timeline;
using Clock = Timeline::Clock;

/// What one window has of a bucket.
struct BucketInFlight {
  torch::Tensor flat;  // gradients, then their sum
  torch::Tensor sent;  // what travels by parts, and what arrives
  torch::Tensor arrived;
  torch::Tensor sum;  // of this rank's part
  compat::Work work;
};

}  // namespace

class GradientReducer::Impl {
 public:
  Impl(std::shared_ptr<RankGroup> group,
       const std::vector<Parameter>& parameters, const ReducerOptions& options)
      : group_(std::move(group)),
        options_(options),
        layout_(parameters, options.bucket_bytes,
                by_parts() ? group_->size() : 1),
        travels_(layout_.buckets().size()),
        timeline_(std::make_shared<Timeline>()) {
    if (options_.shard) pieces_.emplace(group_, layout_);
  }

  void final_from(int stage) {
    const torch::NoGradGuard no_grad;
    add_up_arrived();
    while (next_ < travels_.size() &&
           layout_.buckets()[next_].ready_stage >= stage) {
      start(next_, /*zeros=*/false);
      ++next_;
    }
  }

  void backward_ended() { ended_ = Clock::now(); }

  torch::Tensor finish(const torch::Tensor& loss) {
    const torch::NoGradGuard no_grad;
    const std::vector<bool> used = whole_window(loss, /*zeros=*/false);
    for (size_t b = 0; b < travels_.size(); ++b) {
      const auto& bucket = layout_.buckets()[b];
      for (size_t i = bucket.first; i < bucket.first + bucket.count; ++i) {
        give(layout_.entries()[i], used[i], travels_[b]);
      }
      if (pieces_) pieces_->give_gradients(b, travels_[b].sum, used);
      travels_[b] = {};
    }
    ++counters_.windows;
    return tail_[0];
  }

  void give_up() {
    const torch::NoGradGuard no_grad;
    whole_window({}, /*zeros=*/true);
    for (BucketInFlight& travel : travels_) travel = {};
  }

  int64_t extra_bytes() const {
    int64_t largest = 0, all = 0;
    for (const auto& bucket : layout_.buckets()) {
      largest = std::max(largest, bucket.bytes());
      all += bucket.bytes();
    }
    // A bucket is filled while its gradients are still there. What travels to be
    // added up by parts comes beside what was sent.
    if (options_.bf16) return largest + all / 2;
    return options_.shard ? largest + all : largest;
  }

  const BucketLayout& layout() const { return layout_; }
  Pieces& pieces() {
    TORCH_CHECK(pieces_, "[GradientReducer] expected shard, for pieces");
    return *pieces_;
  }
  bool has_pieces() const { return pieces_.has_value(); }
  const Counters& counters() const { return counters_; }
  int64_t started() const { return static_cast<int64_t>(next_); }
  void keep_gradients(bool keep) { keep_ = keep; }

 private:
  bool by_parts() const { return options_.shard || options_.bf16; }

  void start(size_t b, bool zeros) {
    const auto& bucket = layout_.buckets()[b];
    BucketInFlight& travel = travels_[b];
    travel.flat = torch::empty({bucket.padded}, bucket.options);
    if (zeros) travel.flat.zero_();
    travel.flat.slice(0, bucket.elements).zero_();
    for (size_t i = bucket.first; !zeros && i < bucket.first + bucket.count;
         ++i) {
      const auto& entry = layout_.entries()[i];
      torch::Tensor tensor = entry.parameter.tensor;
      torch::Tensor& gradient = tensor.mutable_grad();
      torch::Tensor place = BucketLayout::view_of(entry, travel.flat);
      if (!gradient.defined()) {
        place.zero_();
        continue;
      }
      TORCH_CHECK(gradient.layout() == torch::kStrided,
                  "[GradientReducer] expected dense gradients, got ",
                  gradient.layout(), " of '", entry.parameter.name, "'");
      place.copy_(gradient);
      defined_.push_back(i);
      if (!keep_) gradient.reset();
    }
    const auto begin = Clock::now();
    if (!by_parts()) {
      travel.work = group_->sum(travel.flat);
      note(travel.work, begin, bucket.bytes());
      return;
    }
    travel.sent =
        options_.bf16 ? travel.flat.to(torch::kBFloat16) : travel.flat;
    travel.flat.reset();
    travel.arrived = torch::empty_like(travel.sent);
    travel.work = group_->all_to_all(travel.arrived, travel.sent);
    note(travel.work, begin, static_cast<int64_t>(travel.sent.nbytes()));
  }

  void note(compat::Work& work, Clock::time_point begin, int64_t bytes) {
    if (bytes > 0) {
      ++counters_.calls;
      counters_.bytes += bytes;
    }
    work.when_done(
        [timeline = timeline_, begin] { timeline->note(begin, Clock::now()); });
  }

  /// Frees what was sent as soon as it can be.
  void add_up_arrived() {
    if (!by_parts()) return;
    for (size_t b = 0; b < next_; ++b) {
      const BucketInFlight& travel = travels_[b];
      if (travel.arrived.defined() && !travel.sum.defined() &&
          travel.work.done()) {
        add_up(b);
      }
    }
  }

  void add_up(size_t b) {
    BucketInFlight& travel = travels_[b];
    group_->wait(travel.work);
    const auto parts = travel.arrived.chunk(group_->size());
    torch::Tensor sum =
        torch::empty(parts[0].sizes(), layout_.buckets()[b].options);
    sum.copy_(parts[0]);
    for (size_t r = 1; r < parts.size(); ++r) sum.add_(parts[r]);
    travel.sum = std::move(sum);
    if (!options_.shard) return;  // what it came with is used again
    travel.sent.reset();
    travel.arrived.reset();
  }

  /// Starts the rest, waits for all. Which entries have a gradient on some rank.
  /// May be called again where it threw: every collective starts once.
  std::vector<bool> whole_window(const torch::Tensor& loss, bool zeros) {
    if (ended_ == Clock::time_point{}) ended_ = Clock::now();
    for (; next_ < travels_.size(); ++next_) start(next_, zeros);
    const size_t entries = layout_.entries().size();
    const bool all_here = defined_.size() == entries;
    if (!tail_work_.valid()) start_tail(loss);
    for (size_t b = 0; b < travels_.size(); ++b) {
      BucketInFlight& travel = travels_[b];
      if (travel.arrived.defined() && !travel.sum.defined()) add_up(b);
      if (!by_parts()) group_->wait(travel.work);
    }
    if (options_.bf16 && !options_.shard) send_back();
    group_->wait(tail_work_);
    const auto [busy, exposed] = timeline_->take(ended_);
    counters_.busy_s += busy;
    counters_.exposed_s += exposed;
    ended_ = {};
    tail_work_ = {};
    next_ = back_ = 0;
    defined_.clear();
    std::vector<bool> used(entries, true);
    if (all_here) return used;  // without waiting for the device
    const torch::Tensor counts = tail_.cpu();
    const double* at = counts.data_ptr<double>() + 1;
    for (size_t i = 0; i < used.size(); ++i) used[i] = at[i] > 0;
    return used;
  }

  void start_tail(const torch::Tensor& loss) {
    std::vector<double> tail(layout_.entries().size() + 1, 0.0);
    for (const size_t i : defined_) tail[i + 1] = 1;
    tail_ = torch::tensor(tail, torch::kDouble)
                .to(layout_.buckets()[0].options.device());
    if (loss.defined()) tail_[0].copy_(loss);
    tail_work_ = group_->sum(tail_);
  }

  /// The sums, rounded, to all; through the memory that they came with.
  void send_back() {
    for (; back_ < travels_.size(); ++back_) {
      BucketInFlight& travel = travels_[back_];
      const auto begin = Clock::now();
      const torch::Tensor own = travel.sent.slice(0, 0, travel.sum.numel());
      own.copy_(travel.sum);
      travel.work = group_->all_gather(travel.arrived, own);
      note(travel.work, begin, 0);
    }
    for (size_t b = 0; b < travels_.size(); ++b) {
      BucketInFlight& travel = travels_[b];
      group_->wait(travel.work);
      if (!travel.flat.defined()) {
        travel.flat = travel.arrived.to(layout_.buckets()[b].options.dtype());
      }
      travel.sum.reset();
    }
  }

  void give(const BucketLayout::Entry& entry, bool used,
            const BucketInFlight& travel) {
    torch::Tensor tensor = entry.parameter.tensor;
    torch::Tensor& gradient = tensor.mutable_grad();
    if (options_.shard) {
      if (!keep_) gradient.reset();
      return;
    }
    if (!used) return;
    const torch::Tensor sum = BucketLayout::view_of(entry, travel.flat);
    if (keep_ && gradient.defined()) {
      gradient.copy_(sum);
    } else {
      gradient = sum;
    }
  }

  std::shared_ptr<RankGroup> group_;
  ReducerOptions options_;
  BucketLayout layout_;
  std::optional<Pieces> pieces_;  // with `shard`
  bool keep_ = false;
  Counters counters_;
  std::vector<BucketInFlight> travels_;  // as the layout's buckets
  std::shared_ptr<Timeline> timeline_;
  size_t next_ = 0;              // bucket to start
  std::vector<size_t> defined_;  // entries with a gradient here, this window
  torch::Tensor tail_;           // loss, and which entries have a gradient
  compat::Work tail_work_;
  size_t back_ = 0;  // bucket whose sum goes back next
  Clock::time_point ended_{};
};

GradientReducer::GradientReducer(std::shared_ptr<RankGroup> group,
                                 const std::vector<Parameter>& parameters,
                                 const ReducerOptions& options)
    : impl_(std::make_unique<Impl>(std::move(group), parameters, options)) {}
GradientReducer::~GradientReducer() = default;

const std::vector<int>& GradientReducer::cuts() const {
  return impl_->layout().cuts();
}
void GradientReducer::final_from(int stage) {
  impl_->final_from(stage);
}
void GradientReducer::backward_ended() {
  impl_->backward_ended();
}
torch::Tensor GradientReducer::finish(const torch::Tensor& loss) {
  return impl_->finish(loss);
}
void GradientReducer::give_up() {
  impl_->give_up();
}
void GradientReducer::keep_gradients(bool keep) {
  impl_->keep_gradients(keep);
}
const GradientReducer::NamedList& GradientReducer::pieces() const {
  static const NamedList none;
  return impl_->has_pieces() ? impl_->pieces().list() : none;
}
void GradientReducer::share_pieces() {
  impl_->pieces().share();
}
GradientReducer::NamedList GradientReducer::whole(
    const NamedList& of_pieces, const std::vector<std::string>& kinds) {
  return impl_->pieces().whole(of_pieces, kinds);
}
GradientReducer::NamedList GradientReducer::parts(
    const NamedList& whole, const std::vector<std::string>& kinds) const {
  return impl_->pieces().parts(whole, kinds);
}
int64_t GradientReducer::buckets() const {
  return static_cast<int64_t>(impl_->layout().buckets().size());
}
int64_t GradientReducer::extra_bytes() const {
  return impl_->extra_bytes();
}
const GradientReducer::Counters& GradientReducer::counters() const {
  return impl_->counters();
}
int64_t GradientReducer::started() const {
  return impl_->started();
}

}  // namespace reprise
