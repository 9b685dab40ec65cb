#pragma once

#include "compat/process_group.h"
#include "distributed/parameter_shards.h"
#include "recompute/stage_parameters.h"

#include <reprise/distributed/group.h>
#include <reprise/plan/cluster.h>

#include <torch/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace reprise::detail {

/// Parameters of a chain that are divided among ranks. Each rank keeps its share of every
/// bucket; those of a stage are gathered ahead of its forward and its backward and freed
/// afterwards. All ranks must visit the same stages in the same order. Optimizers update the
/// pieces of trained(); the parameters themselves have no memory in between.
///
/// Parameters that several stages use are units of their own, gathered for each of them.
/// Tested by tests/distributed/sharded_parameters_test.cpp.
class ShardedParameters final : public StageParameters {
 public:
  using NamedList = GradientReducer::NamedList;

  struct Options {
    int64_t bucket_bytes = int64_t{25} << 20;
    /// Parameters that stages read in `half` only, such as weights that autocast converts: they
    /// travel so, and have the rounded values while they are there. The pieces stay as they are.
    std::vector<torch::Tensor> halved{};
    torch::ScalarType half = torch::kFloat;  ///< kFloat: none
  };

  /// Divides `parameters`, which must be equal on all ranks and dense, and frees their memory.
  /// They may be on the CPU; afterwards they are tensors of `device`.
  ShardedParameters(std::shared_ptr<RankGroup> group, const Chain& chain,
                    const NamedList& parameters, torch::Device device,
                    const Options& options);
  /// Parameters without memory become empty tensors.
  ~ShardedParameters() override;

  bool away() const override { return true; }
  void abandon() override;

  /// The pieces of parameters that require gradients.
  const std::shared_ptr<ParameterShards>& trained() const { return trained_; }
  /// This rank's pieces of all parameters.
  std::vector<ParameterShards::Piece> pieces() const;
  /// Bytes of the parameters of this rank.
  int64_t own_bytes() const;
  /// Device memory that a stage's parameters take while they are gathered.
  const std::vector<int64_t>& stage_bytes() const { return stage_bytes_; }
  /// Bytes that travel to gather them.
  const std::vector<int64_t>& stage_wire_bytes() const {
    return stage_wire_bytes_;
  }
  /// Bytes that travel to gather all parameters once.
  int64_t wire_bytes() const;

  /// Takes part in the gathers of the rest of a micro-batch that failed on this rank, without
  /// computing. Calls `after` for the visit that was interrupted and for each that follows.
  void finish_without_computing(
      const std::function<void(const StageVisit&)>& after);
  /// The same for a forward without begin(), in which bring() was called up to some stage.
  void finish_forward_without_computing();

  /// The network, for plans and for Alone; not known at first.
  void set_network(const Network& network) { network_ = network; }
  const Network& network() const { return network_; }
  int ranks() const { return group_->size(); }

  /// Tensors that hold parameters: the shares, and what is gathered.
  std::vector<torch::Tensor> held() const;

  /// While it exists, this rank gathers nothing: all shares of a parameter are this rank's, and
  /// arrive after the time that a gather would take. For measurements on a single rank.
  class Alone {
   public:
    explicit Alone(ShardedParameters& parameters);
    ~Alone();
    Alone(const Alone&) = delete;
    Alone& operator=(const Alone&) = delete;

   private:
    ShardedParameters& parameters_;
  };

  /// Collective. Returns all parameters on the CPU of rank 0, and an empty list elsewhere.
  NamedList gather_all();
  /// Copies this rank's pieces out of whole parameters.
  void load(const NamedList& full);

  /// Collective. While it exists, parameters are whole tensors of the CPU on rank 0; other
  /// ranks have none.
  class Readable {
   public:
    explicit Readable(ShardedParameters* parameters);  ///< may be null
    ~Readable();
    Readable(const Readable&) = delete;
    Readable& operator=(const Readable&) = delete;

   private:
    ShardedParameters* parameters_;
    std::vector<std::pair<torch::Tensor, torch::Tensor>> shells_;
  };

  struct Counters {
    int64_t calls = 0;  ///< gathers
    int64_t bytes = 0;  ///< of the gathered buckets, as they travel
    double wait_s = 0;  ///< time in which this rank waited for gathers
  };
  const Counters& counters() const { return counters_; }

 private:
  struct Bucket {
    std::shared_ptr<ParameterShards> shards;
    size_t index = 0;  // in its layout
    torch::Tensor values{};
    bool narrow = false;  // in the second half of `values`, in half precision
    compat::Work work{};
    std::chrono::steady_clock::time_point arrives{};  // if this rank is alone
  };
  struct Unit {
    std::vector<Bucket> buckets;
    bool present = false;  // gathered, or on the way, for the visit in progress
  };

  struct Plan;  // units of stages and parameters
  ShardedParameters(std::shared_ptr<RankGroup> group, Plan plan,
                    torch::Device device, const Options& options);
  void add_buckets(const std::shared_ptr<ParameterShards>& shards);
  void start_fetch(size_t unit, bool backward) override;
  void finish_fetch(size_t unit) override;
  void leave(size_t unit) override;
  void brought(int stage) override;
  void gather(Bucket& bucket);
  bool travels_halved(const BucketLayout::Bucket& range) const;
  int64_t wire_bytes(const BucketLayout::Bucket& range) const;
  static void set_memory(const Bucket& bucket);
  void free_memory(Unit& unit);

  std::shared_ptr<RankGroup> group_;
  std::shared_ptr<ParameterShards> trained_;
  std::shared_ptr<ParameterShards> frozen_;  // null: none
  std::vector<Unit> units_;
  std::vector<int64_t> stage_bytes_, stage_wire_bytes_;
  torch::ScalarType half_;
  int stages_ = 0;
  int brought_ = -1;  // last stage of bring()
  bool alone_ = false;
  bool computes_ = true;  // false: gathers for other ranks only
  Network network_;
  std::chrono::steady_clock::time_point lane_free_{};  // if this rank is alone
  Counters counters_;
};

}  // namespace reprise::detail
