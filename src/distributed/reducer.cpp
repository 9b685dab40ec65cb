#include <reprise/distributed/reducer.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>

namespace reprise {
namespace {

using Clock = std::chrono::steady_clock;

/// When collectives were under way, told by the backend's threads.
class Timeline {
 public:
  void note(Clock::time_point begin, Clock::time_point end) {
    const std::lock_guard lock(mutex_);
    spans_.emplace_back(begin, end);
  }

  /// Seconds that any was, in all and after `mark`. Forgets them.
  std::pair<double, double> take(Clock::time_point mark) {
    std::vector<std::pair<Clock::time_point, Clock::time_point>> spans;
    {
      const std::lock_guard lock(mutex_);
      spans.swap(spans_);
    }
    std::sort(spans.begin(), spans.end());
    Clock::duration all{}, after{};
    Clock::time_point reached{};
    for (auto [begin, end] : spans) {
      begin = std::max(begin, reached);
      if (end <= begin) continue;
      all += end - begin;
      if (end > mark) after += end - std::max(begin, mark);
      reached = end;
    }
    return {std::chrono::duration<double>(all).count(),
            std::chrono::duration<double>(after).count()};
  }

 private:
  std::mutex mutex_;
  std::vector<std::pair<Clock::time_point, Clock::time_point>> spans_;
};

int64_t rounded_up(int64_t value, int64_t to) {
  return (value + to - 1) / to * to;
}

/// Values in the order in which they lie, for tensors without gaps.
torch::Tensor as_they_lie(const torch::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}

}  // namespace

class GradientReducer::Impl {
 public:
  Impl(std::shared_ptr<RankGroup> group,
       const std::vector<Parameter>& parameters, const ReducerOptions& options)
      : group_(std::move(group)),
        options_(options),
        timeline_(std::make_shared<Timeline>()) {
    TORCH_CHECK(options.bucket_bytes > 0,
                "[--bucket] expected a size above 0, got ",
                options.bucket_bytes);
    for (const Parameter& parameter : parameters) {
      if (parameter.tensor.requires_grad()) entries_.push_back({parameter});
    }
    TORCH_CHECK(
        !entries_.empty(),
        "[GradientReducer] expected parameters with gradients, got none");
    std::stable_sort(entries_.begin(), entries_.end(),
                     [](const Entry& a, const Entry& b) {
                       return a.parameter.first_stage > b.parameter.first_stage;
                     });
    fill_buckets();
    if (options_.shard) make_pieces();
  }

  void final_from(int stage) {
    const torch::NoGradGuard no_grad;
    add_up_arrived();
    while (next_ < buckets_.size() && buckets_[next_].ready_stage >= stage) {
      start(buckets_[next_], /*zeros=*/false);
      ++next_;
    }
  }

  void backward_ended() { ended_ = Clock::now(); }

  torch::Tensor finish(const torch::Tensor& loss) {
    const torch::NoGradGuard no_grad;
    const std::vector<bool> used = whole_window(loss, /*zeros=*/false);
    size_t at = 0;
    for (Bucket& bucket : buckets_) {
      for (size_t i = 0; i < bucket.count; ++i) {
        give(entries_[at], used[at], bucket);
        ++at;
      }
      if (options_.shard) give_pieces(bucket, used);
      bucket.clear();
    }
    ++counters_.windows;
    return tail_[0];
  }

  void give_up() {
    const torch::NoGradGuard no_grad;
    whole_window({}, /*zeros=*/true);
    for (Bucket& bucket : buckets_) bucket.clear();
  }

  void share_pieces() {
    const torch::NoGradGuard no_grad;
    // One on its way while the one before is put in place.
    std::pair<torch::Tensor, compat::Work> before;
    for (size_t b = 0; b <= buckets_.size(); ++b) {
      std::pair<torch::Tensor, compat::Work> now;
      if (b < buckets_.size()) now = gather(buckets_[b], pieces_in(b, ""));
      if (b > 0) {
        group_->wait(before.second);
        scatter(buckets_[b - 1], before.first);
      }
      before = std::move(now);
    }
  }

  NamedList whole(const NamedList& of_pieces,
                  const std::vector<std::string>& kinds) {
    const torch::NoGradGuard no_grad;
    std::map<std::string, torch::Tensor> by_name(of_pieces.begin(),
                                                 of_pieces.end());
    NamedList result;
    for (const std::string& kind : kinds) {
      for (size_t b = 0; b < buckets_.size(); ++b) {
        whole_of(kind, b, by_name, result);
      }
    }
    return result;
  }

  NamedList parts(const NamedList& whole,
                  const std::vector<std::string>& kinds) const {
    const torch::NoGradGuard no_grad;
    std::map<std::string, torch::Tensor> by_name(whole.begin(), whole.end());
    NamedList result;
    for (const auto& [name, tensor] : whole) {
      if (!entry_of(name, kinds)) result.emplace_back(name, tensor);
    }
    for (const std::string& kind : kinds) {
      for (const Piece& piece : piece_list_) {
        const auto found =
            by_name.find(kind + entries_[piece.entry].parameter.name);
        if (found == by_name.end()) continue;
        const torch::Tensor& tensor = entries_[piece.entry].parameter.tensor;
        torch::Tensor laid = torch::empty_strided(
            tensor.sizes(), tensor.strides(), found->second.options());
        laid.copy_(found->second);
        result.emplace_back(found->first,
                            as_they_lie(laid)
                                .slice(0, piece.from, piece.from + piece.size)
                                .clone());
      }
    }
    return result;
  }

  int64_t extra_bytes() const {
    int64_t largest = 0, all = 0;
    for (const Bucket& bucket : buckets_) {
      const int64_t bytes = bucket.padded * bucket.element_bytes;
      largest = std::max(largest, bytes);
      all += bytes;
    }
    // A bucket is filled while its gradients are still there. What travels to be
    // added up by parts comes beside what was sent.
    if (options_.bf16) return largest + all / 2;
    return options_.shard ? largest + all : largest;
  }

  std::shared_ptr<RankGroup> group_;
  ReducerOptions options_;
  bool keep_ = false;
  std::vector<int> cuts_;
  Counters counters_;
  NamedList pieces_;
  size_t next_ = 0;  // bucket to start

  int64_t bucket_count() const { return static_cast<int64_t>(buckets_.size()); }

 private:
  struct Entry {
    Parameter parameter;
    int64_t offset = 0;  // in its bucket, elements
  };

  struct Bucket {
    size_t first = 0, count = 0;  // entries
    int64_t elements = 0;
    int64_t padded = 0;  // so that ranks can share it
    int64_t element_bytes = 0;
    int ready_stage = 0;
    torch::TensorOptions options{};
    // Of this window.
    torch::Tensor flat;  // gradients, then their sum
    torch::Tensor sent;  // what travels by parts, and what arrives
    torch::Tensor arrived;
    torch::Tensor sum;  // of this rank's part
    compat::Work work;

    void clear() {
      flat = sent = arrived = sum = torch::Tensor();
      work = {};
    }
  };

  struct Piece {
    size_t bucket = 0;
    size_t entry = 0;
    int64_t from = 0;  // in the parameter
    int64_t size = 0;
    int64_t at = 0;  // in this rank's part of the bucket
  };

  bool by_parts() const { return options_.shard || options_.bf16; }

  void fill_buckets() {
    const int ranks = group_->size();
    for (size_t i = 0; i < entries_.size(); ++i) {
      const torch::Tensor& tensor = entries_[i].parameter.tensor;
      const auto bytes = static_cast<int64_t>(tensor.nbytes());
      const bool fits =
          !buckets_.empty() &&
          buckets_.back().options.dtype() == tensor.dtype() &&
          buckets_.back().options.device() == tensor.device() &&
          buckets_.back().elements * buckets_.back().element_bytes + bytes <=
              options_.bucket_bytes;
      if (!fits) {
        Bucket& bucket = buckets_.emplace_back();
        bucket.first = i;
        bucket.element_bytes = static_cast<int64_t>(tensor.element_size());
        bucket.options = tensor.options().requires_grad(false);
      }
      Bucket& bucket = buckets_.back();
      entries_[i].offset = bucket.elements;
      bucket.elements += tensor.numel();
      bucket.ready_stage = std::max(0, entries_[i].parameter.first_stage);
      ++bucket.count;
    }
    for (Bucket& bucket : buckets_) {
      bucket.padded =
          by_parts() ? rounded_up(bucket.elements, ranks) : bucket.elements;
      const int stage = bucket.ready_stage;
      if (stage > 0 && (cuts_.empty() || cuts_.back() != stage)) {
        cuts_.push_back(stage);
      }
    }
  }

  void make_pieces() {
    const torch::NoGradGuard no_grad;
    for (size_t b = 0; b < buckets_.size(); ++b) {
      const Bucket& bucket = buckets_[b];
      const int64_t part = bucket.padded / group_->size();
      const int64_t begin = part * group_->rank();
      for (size_t i = bucket.first; i < bucket.first + bucket.count; ++i) {
        const Entry& entry = entries_[i];
        const torch::Tensor& tensor = entry.parameter.tensor;
        TORCH_CHECK(
            tensor.is_non_overlapping_and_dense(),
            "[--shard] expected parameters that lie in one piece, got '",
            entry.parameter.name, "' with strides ", tensor.strides());
        const int64_t from = std::max(begin, entry.offset);
        const int64_t to =
            std::min(begin + part, entry.offset + tensor.numel());
        if (to <= from) continue;
        piece_list_.push_back(
            {b, i, from - entry.offset, to - from, from - begin});
        pieces_.emplace_back(
            entry.parameter.name,
            as_they_lie(tensor.detach())
                .slice(0, from - entry.offset, to - entry.offset));
      }
    }
  }

  torch::Tensor view_of(const Entry& entry, const torch::Tensor& flat) const {
    const torch::Tensor& tensor = entry.parameter.tensor;
    if (tensor.is_non_overlapping_and_dense()) {
      return flat.as_strided(tensor.sizes(), tensor.strides(),
                             flat.storage_offset() + entry.offset);
    }
    return flat.slice(0, entry.offset, entry.offset + tensor.numel())
        .view(tensor.sizes());
  }

  void start(Bucket& bucket, bool zeros) {
    bucket.flat = torch::empty({bucket.padded}, bucket.options);
    if (zeros) bucket.flat.zero_();
    bucket.flat.slice(0, bucket.elements).zero_();
    for (size_t i = bucket.first; !zeros && i < bucket.first + bucket.count;
         ++i) {
      torch::Tensor tensor = entries_[i].parameter.tensor;
      torch::Tensor& gradient = tensor.mutable_grad();
      torch::Tensor place = view_of(entries_[i], bucket.flat);
      if (!gradient.defined()) {
        place.zero_();
        continue;
      }
      TORCH_CHECK(gradient.layout() == torch::kStrided,
                  "[GradientReducer] expected dense gradients, got ",
                  gradient.layout(), " of '", entries_[i].parameter.name, "'");
      place.copy_(gradient);
      defined_.push_back(i);
      if (!keep_) gradient.reset();
    }
    const auto begin = Clock::now();
    if (!by_parts()) {
      bucket.work = group_->sum(bucket.flat);
      note(bucket.work, begin, bucket.padded * bucket.element_bytes);
      return;
    }
    bucket.sent =
        options_.bf16 ? bucket.flat.to(torch::kBFloat16) : bucket.flat;
    bucket.flat.reset();
    bucket.arrived = torch::empty_like(bucket.sent);
    bucket.work = group_->all_to_all(bucket.arrived, bucket.sent);
    note(bucket.work, begin, static_cast<int64_t>(bucket.sent.nbytes()));
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
      Bucket& bucket = buckets_[b];
      if (bucket.arrived.defined() && !bucket.sum.defined() &&
          bucket.work.done()) {
        add_up(bucket);
      }
    }
  }

  void add_up(Bucket& bucket) {
    group_->wait(bucket.work);
    const auto parts = bucket.arrived.chunk(group_->size());
    torch::Tensor sum = torch::empty(parts[0].sizes(), bucket.options);
    sum.copy_(parts[0]);
    for (size_t r = 1; r < parts.size(); ++r) sum.add_(parts[r]);
    bucket.sum = std::move(sum);
    if (!options_.shard) return;  // what it came with is used again
    bucket.sent.reset();
    bucket.arrived.reset();
  }

  /// Starts the rest, waits for all. Which entries have a gradient on some rank.
  /// May be called again where it threw: every collective starts once.
  std::vector<bool> whole_window(const torch::Tensor& loss, bool zeros) {
    if (ended_ == Clock::time_point{}) ended_ = Clock::now();
    for (; next_ < buckets_.size(); ++next_) start(buckets_[next_], zeros);
    const bool all_here = defined_.size() == entries_.size();
    if (!tail_work_.valid()) start_tail(loss);
    for (Bucket& bucket : buckets_) {
      if (bucket.arrived.defined() && !bucket.sum.defined()) add_up(bucket);
      if (!by_parts()) group_->wait(bucket.work);
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
    std::vector<bool> used(entries_.size(), true);
    if (all_here) return used;  // without waiting for the device
    const torch::Tensor counts = tail_.cpu();
    const double* at = counts.data_ptr<double>() + 1;
    for (size_t i = 0; i < used.size(); ++i) used[i] = at[i] > 0;
    return used;
  }

  void start_tail(const torch::Tensor& loss) {
    std::vector<double> tail(entries_.size() + 1, 0.0);
    for (const size_t i : defined_) tail[i + 1] = 1;
    tail_ =
        torch::tensor(tail, torch::kDouble).to(buckets_[0].options.device());
    if (loss.defined()) tail_[0].copy_(loss);
    tail_work_ = group_->sum(tail_);
  }

  /// The sums, rounded, to all; through the memory that they came with.
  void send_back() {
    for (; back_ < buckets_.size(); ++back_) {
      Bucket& bucket = buckets_[back_];
      const auto begin = Clock::now();
      const torch::Tensor own = bucket.sent.slice(0, 0, bucket.sum.numel());
      own.copy_(bucket.sum);
      bucket.work = group_->all_gather(bucket.arrived, own);
      note(bucket.work, begin, 0);
    }
    for (Bucket& bucket : buckets_) {
      group_->wait(bucket.work);
      if (!bucket.flat.defined()) {
        bucket.flat = bucket.arrived.to(bucket.options.dtype());
      }
      bucket.sum.reset();
    }
  }

  void give(Entry& entry, bool used, Bucket& bucket) {
    torch::Tensor tensor = entry.parameter.tensor;
    torch::Tensor& gradient = tensor.mutable_grad();
    if (options_.shard) {
      if (!keep_) gradient.reset();
      return;
    }
    if (!used) return;
    const torch::Tensor sum = view_of(entry, bucket.flat);
    if (keep_ && gradient.defined()) {
      gradient.copy_(sum);
    } else {
      gradient = sum;
    }
  }

  void give_pieces(const Bucket& bucket, const std::vector<bool>& used) {
    const auto b = static_cast<size_t>(&bucket - buckets_.data());
    for (size_t i = 0; i < piece_list_.size(); ++i) {
      const Piece& piece = piece_list_[i];
      if (piece.bucket != b) continue;
      torch::Tensor& gradient = pieces_[i].second.mutable_grad();
      gradient.reset();
      if (used[piece.entry]) {
        gradient = bucket.sum.slice(0, piece.at, piece.at + piece.size);
      }
    }
  }

  using Values = std::vector<std::pair<int64_t, torch::Tensor>>;

  /// This rank's values in a bucket with their places; empty `kind`: parameters.
  Values pieces_in(size_t b, const std::string& kind,
                   const std::map<std::string, torch::Tensor>& by_name = {}) {
    Values values;
    for (size_t i = 0; i < piece_list_.size(); ++i) {
      const Piece& piece = piece_list_[i];
      if (piece.bucket != b) continue;
      if (kind.empty()) {
        values.emplace_back(piece.at, pieces_[i].second);
        continue;
      }
      const auto found = by_name.find(kind + pieces_[i].first);
      if (found != by_name.end()) values.emplace_back(piece.at, found->second);
    }
    return values;
  }

  std::pair<torch::Tensor, compat::Work> gather(const Bucket& bucket,
                                                const Values& values) {
    const int64_t part = bucket.padded / group_->size();
    torch::Tensor own = torch::zeros({part}, bucket.options);
    for (const auto& [at, tensor] : values) {
      own.slice(0, at, at + tensor.numel()).copy_(tensor.detach().view({-1}));
    }
    torch::Tensor all = torch::empty({bucket.padded}, bucket.options);
    compat::Work work = group_->all_gather(all, own);
    return {all, work};
  }

  void scatter(const Bucket& bucket, const torch::Tensor& all) {
    for (size_t i = bucket.first; i < bucket.first + bucket.count; ++i) {
      entries_[i].parameter.tensor.detach().copy_(view_of(entries_[i], all));
    }
  }

  void whole_of(const std::string& kind, size_t b,
                const std::map<std::string, torch::Tensor>& by_name,
                NamedList& result) {
    const Bucket& bucket = buckets_[b];
    const Values values = pieces_in(b, kind, by_name);
    // Which parameters any rank has values of.
    std::vector<int64_t> has(bucket.count, 0);
    for (size_t i = 0; i < bucket.count; ++i) {
      has[i] =
          by_name.count(kind + entries_[bucket.first + i].parameter.name) > 0;
    }
    has = group_->largest(std::move(has));
    auto [all, work] = gather(bucket, values);
    group_->wait(work);
    if (group_->rank() != 0) return;
    const torch::Tensor host = all.cpu();
    for (size_t i = 0; i < bucket.count; ++i) {
      if (has[i] == 0) continue;
      const Entry& entry = entries_[bucket.first + i];
      result.emplace_back(kind + entry.parameter.name,
                          view_of(entry, host).clone());
    }
  }

  bool entry_of(const std::string& name,
                const std::vector<std::string>& kinds) const {
    for (const std::string& kind : kinds) {
      if (!name.starts_with(kind)) continue;
      for (const Entry& entry : entries_) {
        if (name.compare(kind.size(), std::string::npos,
                         entry.parameter.name) == 0) {
          return true;
        }
      }
    }
    return false;
  }

  std::shared_ptr<Timeline> timeline_;
  std::vector<Entry> entries_;  // in the order of their buckets
  std::vector<Bucket> buckets_;
  std::vector<Piece> piece_list_;  // as pieces_
  std::vector<size_t> defined_;    // entries with a gradient here, this window
  torch::Tensor tail_;             // loss, and which entries have a gradient
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
  return impl_->cuts_;
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
  impl_->keep_ = keep;
}
const GradientReducer::NamedList& GradientReducer::pieces() const {
  return impl_->pieces_;
}
void GradientReducer::share_pieces() {
  impl_->share_pieces();
}
GradientReducer::NamedList GradientReducer::whole(
    const NamedList& of_pieces, const std::vector<std::string>& kinds) {
  return impl_->whole(of_pieces, kinds);
}
GradientReducer::NamedList GradientReducer::parts(
    const NamedList& whole, const std::vector<std::string>& kinds) const {
  return impl_->parts(whole, kinds);
}
int64_t GradientReducer::buckets() const {
  return impl_->bucket_count();
}
int64_t GradientReducer::extra_bytes() const {
  return impl_->extra_bytes();
}
const GradientReducer::Counters& GradientReducer::counters() const {
  return impl_->counters_;
}
int64_t GradientReducer::started() const {
  return static_cast<int64_t>(impl_->next_);
}

}  // namespace reprise
