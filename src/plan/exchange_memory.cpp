#include "plan/exchange_memory.h"

#include <algorithm>

namespace reprise::detail {
namespace {

/// Follows the memory of a GradientReducer through a backward.
class Exchange {
 public:
  Exchange(const std::vector<SentBucket>& buckets, const ExchangeRules& rules)
      : buckets_(buckets), rules_(rules) {}

  void final_from(int stage) {
    peak_ = now_ - gone_;
    while (next_ < buckets_.size() && buckets_[next_].ready_stage >= stage) {
      start(buckets_[next_++]);
    }
  }

  void finish() {
    final_from(0);
    while (scatters() && summed_ < next_) sum();
    if (!rules_.half || rules_.divided) return;
    for (const SentBucket& bucket : buckets_) {
      now_ += bucket.bytes;  // in full precision
      note(now_);
      now_ -= bucket.bytes / rules_.ranks;
    }
  }

  int64_t now() const { return now_; }    ///< bytes of buckets
  int64_t gone() const { return gone_; }  ///< bytes of gradients
  /// Largest number of bytes since the last call of final_from(), without what is gone.
  int64_t peak() const { return peak_; }

 private:
  bool scatters() const { return rules_.divided || rules_.half; }
  int64_t wire(const SentBucket& bucket) const {
    return rules_.half ? bucket.bytes / 2 : bucket.bytes;
  }
  void note(int64_t bytes) { peak_ = std::max(peak_, bytes - gone_); }

  void start(const SentBucket& bucket) {
    const auto most = static_cast<size_t>(rules_.most_in_flight);
    while (most > 0 && next_ - summed_ > most) sum();
    note(now_ + bucket.bytes);  // beside the gradients
    if (!rules_.keeps_gradients) gone_ += bucket.gradient_bytes;
    if (rules_.half) note(now_ + bucket.bytes + wire(bucket));
    now_ += scatters() ? 2 * wire(bucket) : bucket.bytes;
    note(now_);
  }

  void sum() {
    const SentBucket& bucket = buckets_[summed_++];
    now_ += bucket.bytes / rules_.ranks;
    note(now_);
    if (rules_.divided) now_ -= 2 * wire(bucket);
  }

  const std::vector<SentBucket>& buckets_;
  const ExchangeRules& rules_;
  size_t next_ = 0, summed_ = 0;
  int64_t now_ = 0, gone_ = 0, peak_ = 0;
};

}  // namespace

ExchangeRules rules_of(Sharding shard, int ranks, bool half) {
  ExchangeRules rules{
      .ranks = ranks, .divided = shard != Sharding::kNone, .half = half};
  // With few on the way, gradients never exist all at once.
  if (shard > Sharding::kOptimizer) rules.most_in_flight = 2;
  rules.gathers_updated =
      shard == Sharding::kOptimizer || shard == Sharding::kGradients;
  return rules;
}

ExchangeMemory exchange_memory(const std::vector<SentBucket>& buckets,
                               int stages, const ExchangeRules& rules) {
  ExchangeMemory memory;
  const auto n = static_cast<size_t>(stages);
  memory.left.resize(n);
  memory.held.resize(n);
  memory.peak.resize(n);
  Exchange exchange(buckets, rules);
  for (size_t i = n; i-- > 0;) {
    const int64_t before = exchange.now() - exchange.gone();
    exchange.final_from(static_cast<int>(i));
    memory.left[i] = exchange.gone();
    memory.held[i] = exchange.now();
    memory.peak[i] = exchange.peak() - before;
  }
  exchange.finish();
  memory.end_peak = exchange.peak();
  int64_t all = 0, gradients = 0, largest = 0;
  for (const SentBucket& bucket : buckets) {
    all += bucket.bytes;
    gradients += bucket.gradient_bytes;
    largest = std::max(largest, bucket.bytes);
  }
  memory.sums = rules.divided           ? all / rules.ranks
                : rules.keeps_gradients ? 0
                                        : all;
  if (rules.keeps_gradients) memory.sums += gradients;
  // Two buckets at a time, each beside this rank's share.
  if (rules.gathers_updated)
    memory.gather = 2 * (largest + largest / rules.ranks);
  return memory;
}

}  // namespace reprise::detail
