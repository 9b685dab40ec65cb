#pragma once

#include <reprise/memory/meter.h>
#include <reprise/recompute/stage.h>
#include <reprise/train/options.h>

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace reprise::detail {

/// Work that is recorded once and then repeated as a whole: a CUDA graph.
class Recorded {
 public:
  virtual ~Recorded() = default;
  /// Records `body` and runs nothing of it.
  virtual void capture(const std::function<void()>& body) = 0;
  virtual void replay() = 0;
  virtual int64_t bytes()
      const = 0;  ///< of tensors, that it holds on the device
};

/// Makes those of one shared memory.
using MakeRecorded = std::function<std::unique_ptr<Recorded>()>;

/// For tests: while it lives, `make` stands in for CUDA graphs, on any device.
class RecordedInstead {
 public:
  explicit RecordedInstead(MakeRecorded make);
  ~RecordedInstead();
  RecordedInstead(const RecordedInstead&) = delete;
  RecordedInstead& operator=(const RecordedInstead&) = delete;
};

/// The graphs of a micro-step, one a shape of its batch.
///
/// A shape runs without a graph at first sight: that sets up the libraries, chooses
/// kernels and makes the gradients. At the next one it is captured. Where that is
/// impossible, the step runs without graphs from then on, and the reason is told
/// once; since a capture runs nothing, nothing is lost by it.
class StepGraphs {
 public:
  using Step = std::function<void(const Tensors&)>;

  struct Options {
    torch::Device device;
    GraphMode mode = GraphMode::kAuto;
    std::string refusal{};  ///< why none can be made; empty: they can
    /// Whose values and gradients, and `buffers` whose values, a step uses.
    std::vector<torch::Tensor> parameters{};
    std::vector<torch::Tensor> buffers{};
    std::function<void(const std::string&)> warn{};
  };

  /// Shapes that have a graph at one time; others run without.
  static constexpr size_t kMost = 4;

  explicit StepGraphs(Options options);

  /// Whether graphs are made, now or later.
  bool active() const { return active_; }

  /// `batch` is about to run without a graph.
  void see(const Tensors& batch);

  /// Runs `step` of `batch` by a graph. False: nothing was done, run it without.
  /// `step` is called with other tensors of the same shapes, and must be the same
  /// for all calls until drop().
  bool run(const Tensors& batch, const Step& step);

  /// Forgets all graphs and shapes, and lets go of their memory.
  void clear();

  /// The same because the step is another one from now on. Graphs that were given
  /// up for want of memory are tried again.
  void drop();

  /// The same because memory ran out; the second time for good.
  void drop_for_memory();

  /// No graphs until drop(); `reason` is told. For want of memory alone.
  void give_up_memory(const std::string& reason);

  /// Where the graphs and all else together take more, they are given up. 0: any.
  void set_limit(int64_t bytes) { limit_bytes_ = bytes; }

  /// What comes and goes between the steps, as the update's temporaries do: it cannot be
  /// of the graphs' memory.
  void set_between(int64_t bytes) { between_bytes_ = bytes; }

  /// Device memory that nobody else can have, whether a graph runs or not.
  int64_t bytes() const { return bytes_; }
  /// Most that was live while there were graphs, with their memory, since
  /// restart_peak(); 0: there were none.
  int64_t peak_bytes();
  void restart_peak();

  int64_t captures() const { return captures_; }
  int64_t replays() const { return replays_; }
  /// "on", "off", or "off: " and why.
  std::string state() const;

 private:
  struct Shape {
    std::vector<int64_t> key;
    bool seen = false;
    Tensors inputs;  // what the graph reads
    std::unique_ptr<Recorded> graph;
  };

  bool has_graphs() const { return !places_.empty(); }
  Shape& shape_of(const Tensors& batch);
  bool capture(Shape& shape, const Tensors& batch, const Step& step);
  void record(Shape& shape, const Tensors& batch, const Step& step);
  void give_up(const std::string& reason);
  std::vector<const void*> places() const;

  Options options_;
  bool active_ = false;
  std::string reason_;  // why not; empty: not asked for
  bool for_memory_ = false;
  int memory_failures_ = 0;
  std::vector<Shape> shapes_;
  std::vector<const void*> places_;  // of what the graphs use; empty: no graph
  MakeRecorded make_;                // null: none was made since drop()
  MemoryMeter meter_;
  int64_t limit_bytes_ = 0;
  int64_t between_bytes_ = 0;
  int64_t bytes_ = 0;
  int64_t peak_bytes_ = 0;
  int64_t captures_ = 0;
  int64_t replays_ = 0;
};

}  // namespace reprise::detail
