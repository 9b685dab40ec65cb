#pragma once

#include <reprise/memory/meter.h>
#include <reprise/recompute/stage.h>
#include <reprise/train/options.h>

#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace reprise::detail {

/// Work that is captured once and replayed as a whole, such as a CUDA graph.
class Recorded {
 public:
  virtual ~Recorded() = default;
  /// Captures `body` without executing its work on the device.
  virtual void capture(const std::function<void()>& body) = 0;
  virtual void replay() = 0;
  virtual int64_t bytes()
      const = 0;  ///< device memory of the tensors that it holds
};

/// Creates objects that share one memory pool.
using MakeRecorded = std::function<std::unique_ptr<Recorded>()>;

/// Replaces CUDA graphs by `make` during its lifetime, on any device. For
/// tests.
class RecordedInstead {
 public:
  explicit RecordedInstead(MakeRecorded make);
  ~RecordedInstead();
  RecordedInstead(const RecordedInstead&) = delete;
  RecordedInstead& operator=(const RecordedInstead&) = delete;
};

/// The CUDA graphs of a micro-step, one per shape of its batch.
///
/// The first batch of a shape runs without a CUDA graph, which initializes
/// libraries, selects kernels and allocates the gradients. The second one is
/// captured. If the capture fails, all following steps run without CUDA graphs
/// and the reason is reported once. A capture executes nothing, so a failed one
/// does not change any results.
///
/// Tested by tests/train/step/graph_test.cpp and tests/train/step/graph_cuda_test.cpp.
class StepGraphs {
 public:
  using Step = std::function<void(const Tensors&)>;

  struct Options {
    torch::Device device;
    GraphMode mode = GraphMode::kAuto;
    /// Reason why CUDA graphs cannot be used; empty: they can.
    std::string refusal{};
    /// Parameters and buffers that a step uses. Captured CUDA graphs are
    /// dropped if the memory of one of them, or of a gradient, moves.
    std::vector<torch::Tensor> parameters{};
    std::vector<torch::Tensor> buffers{};
    std::function<void(const std::string&)> warn{};
  };

  /// Maximum number of shapes with a CUDA graph; others run without one.
  static constexpr size_t kMost = 4;

  explicit StepGraphs(Options options);

  /// Whether CUDA graphs are enabled.
  bool active() const { return active_; }

  /// Notes that a batch of this shape runs without a CUDA graph.
  void see(const Tensors& batch);

  /// Runs `step` on `batch` with a CUDA graph, which is captured if necessary.
  /// Returns false if nothing was run; the caller must then run the step
  /// itself. `step` is called with other tensors of the same shapes, and must
  /// be the same for all calls until drop().
  bool run(const Tensors& batch, const Step& step);

  /// Drops all CUDA graphs and shapes, and frees their memory.
  void clear();

  /// Calls clear() because the step changes. CUDA graphs that were disabled for
  /// lack of memory are enabled again.
  void drop();

  /// Calls clear() because the step changes, and replaces Options::refusal. Throws c10::Error
  /// if CUDA graphs are required but refused.
  void set_refusal(const std::string& reason);

  /// Called when memory ran out. If there are CUDA graphs, calls clear(); the
  /// second time disables them until drop().
  void drop_for_memory();

  /// Disables CUDA graphs for lack of memory until drop(), and reports
  /// `reason`.
  void give_up_memory(const std::string& reason);

  /// Sets the memory budget of the training; 0: none. CUDA graphs are disabled
  /// if the training would exceed it with them.
  void set_limit(int64_t bytes) { limit_bytes_ = bytes; }

  /// Notes transient memory used between steps, such as the temporaries of an update and of
  /// the preparation of a batch. It cannot come from the memory pool of the CUDA graphs.
  void note_between(int64_t bytes) {
    between_bytes_ = std::max(between_bytes_, bytes);
  }

  /// Device memory reserved for the CUDA graphs, whether they run or not.
  int64_t bytes() const { return bytes_; }
  /// Peak of live memory while CUDA graphs existed, including their memory,
  /// since restart_peak(); 0: there were none.
  int64_t peak_bytes();
  void restart_peak();

  int64_t captures() const { return captures_; }
  int64_t replays() const { return replays_; }
  /// Returns "on", "off" or "off: REASON".
  std::string state() const;

 private:
  struct Shape {
    std::vector<int64_t> key;
    bool seen = false;
    Tensors inputs;  // read by the CUDA graph
    std::unique_ptr<Recorded> graph;
  };

  void decide();
  bool has_graphs() const { return !places_.empty(); }
  Shape& shape_of(const Tensors& batch);
  bool capture(Shape& shape, const Tensors& batch, const Step& step);
  void record(Shape& shape, const Tensors& batch, const Step& step);
  void give_up(const std::string& reason);
  std::vector<const void*> places() const;

  Options options_;
  bool active_ = false;
  std::string reason_;  // why inactive; empty: not requested
  bool for_memory_ = false;
  int memory_failures_ = 0;
  std::vector<Shape> shapes_;
  // Addresses that the CUDA graphs use; empty: there are none.
  std::vector<const void*> places_;
  MakeRecorded make_;  // null: no capture since clear()
  MemoryMeter meter_;
  int64_t limit_bytes_ = 0;
  int64_t between_bytes_ = 0;  // the most
  int64_t bytes_ = 0;
  int64_t peak_bytes_ = 0;
  int64_t captures_ = 0;
  int64_t replays_ = 0;
};

}  // namespace reprise::detail
