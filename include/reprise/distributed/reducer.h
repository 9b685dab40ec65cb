#pragma once

#include <reprise/distributed/group.h>

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace reprise {

struct ReducerOptions {
  int64_t bucket_bytes = int64_t{25}
                         << 20;  ///< of gradients that travel together
  /// Gradients travel as bfloat16: half the bytes. Each rank adds up a part of the
  /// values of all in single precision, and rounds the sum once more to send it back.
  bool bf16 = false;
  /// Each rank gets the sum of its share of the values only; see pieces().
  bool shard = false;
};

/// Adds up the gradients of all ranks, once a window, in flat buckets that start on
/// their way while the backward that ends the window still runs.
///
///     GradientReducer reducer(group, parameters, first_stages, options);
///     // of the window's last micro-batch:
///     Execution execution(chain, schedule, {.cuts = reducer.cuts(),
///         .final_from = [&](int stage) { reducer.final_from(stage); }});
///     …
///     reducer.backward_ended();
///     reducer.finish(loss_sum);          // waits; `.grad` are the sums
///
/// Parameters are taken in the order in which a backward ends with them, that of the
/// last stages first; a bucket starts as soon as its last one is final. So all ranks
/// start the same buckets in the same order, whatever they compute, and a rank that
/// has no micro-batch takes part by finish() alone.
///
/// A parameter without a gradient on this rank counts as zeros; one that has none on
/// any rank has none afterwards. One thread at a time.
class GradientReducer {
 public:
  struct Parameter {
    std::string name;
    torch::Tensor tensor;
    int first_stage = 0;  ///< that uses it
  };

  GradientReducer(std::shared_ptr<RankGroup> group,
                  const std::vector<Parameter>& parameters,
                  const ReducerOptions& options = {});
  ~GradientReducer();
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  /// Stages at which the chain's graph should be cut, so that buckets start early.
  const std::vector<int>& cuts() const;

  /// All gradients whose first stage is `stage` or later are final: starts buckets.
  /// With `keep_gradients` off their tensors are released.
  void final_from(int stage);

  /// The device's work of this window is done: what is under way from now on is
  /// waited for.
  void backward_ended();

  /// Starts what has not started, waits, and puts the sums into `.grad`, of the
  /// parameters or, with `shard`, of the pieces; the parameters' are gone then.
  /// Returns the sum of `loss`, a scalar on the device, over all ranks.
  torch::Tensor finish(const torch::Tensor& loss);

  /// Takes part in a window that this rank could not compute: what has not started
  /// goes on its way as zeros. All ranks must learn that the sums are worth nothing.
  void give_up();

  /// `.grad` stay where they are, and get the sums there. Off by default: they become
  /// views of the buckets.
  void keep_gradients(bool keep);

  /// With `shard`: this rank's share of the parameters, as views, a name a parameter.
  /// Their `.grad` are set by finish(). After their update share_pieces() brings all
  /// parameters up to date on all ranks.
  const std::vector<std::pair<std::string, torch::Tensor>>& pieces() const;
  void share_pieces();

  /// Tensors by the names of pieces and of their sizes, as whole ones of the
  /// parameters' shapes on the host of rank 0; the others get an empty list. `kinds`
  /// are prefixes that every rank knows; a kind that no rank has values of is left
  /// out.
  using NamedList = std::vector<std::pair<std::string, torch::Tensor>>;
  NamedList whole(const NamedList& of_pieces,
                  const std::vector<std::string>& kinds);
  /// The other way: of whole tensors the parts that belong to this rank's pieces.
  /// Names that are no parameter's pass through.
  NamedList parts(const NamedList& whole,
                  const std::vector<std::string>& kinds) const;

  int64_t buckets() const;
  /// Most that is held besides the gradients themselves, at one moment.
  int64_t extra_bytes() const;

  struct Counters {
    int64_t windows = 0;
    int64_t calls = 0;  ///< collectives that carried gradients to be added up
    int64_t bytes = 0;  ///< of these gradients, as they travelled
    /// Seconds in which some were under way, and of these, after backward_ended().
    /// Gloo alone.
    double busy_s = 0;
    double exposed_s = 0;
  };
  const Counters& counters() const;
  /// Of the window at hand: collectives started so far.
  int64_t started() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace reprise
