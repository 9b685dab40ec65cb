#pragma once

#include "train/optim/partial_optimizer.h"
#include "train/optim/state_ring.h"

#include <reprise/train/optimizer.h>

#include <torch/types.h>

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace reprise {

/// Base class of the optimizers. Gathers the parameters that have a gradient
/// into lists, and holds, saves and loads state and counters. A derived class
/// declares its state and implements the update. Tested by
/// tests/train/optim/optimizer_test.cpp.
class ListOptimizer : public Optimizer, public detail::PartialOptimizer {
 public:
  /// `kinds` are the names of the state tensors of a parameter, such as
  /// "exp_avg".
  ListOptimizer(const NamedTensors& parameters, std::vector<std::string> kinds);

  void step(double lr) final;
  NamedTensors state() const final;
  std::vector<torch::Tensor> held() const override;
  void load(const NamedTensors& state) final;

  void begin_update(double lr) final;
  void update_some(const std::vector<torch::Tensor>& parameters,
                   bool captured) final;
  void end_update(const std::vector<torch::Tensor>& updated) final;
  std::string capture_refusal() const final;

  bool move_state(std::shared_ptr<detail::HostTensors> host,
                  double share) final;
  int64_t host_state_bytes() const final;
  void round_stochastically() final { rounds_ = true; }

 protected:
  using Tensors = std::vector<torch::Tensor>;

  /// Parallel lists of the parameters to update.
  struct List {
    Tensors parameters;
    Tensors gradients;
    std::vector<int64_t> counts;  // updates including this one
    std::vector<Tensors> state;   // by kind
    Tensors workspace;            // result of make_workspace()
    // For parts of an update, of each parameter: values in device memory that
    // depend on the update; see step_values(). Empty: not used.
    std::vector<const float*> step_values;
  };

  /// Values that update_fused() reads from device memory if the list has
  /// `step_values`, for update number `count` of a parameter.
  static constexpr int kStepValues = 3;
  using StepValues = std::array<double, kStepValues>;
  virtual StepValues step_values(double lr, int64_t count) const;

  /// Whether update_fused() can read its step values from device memory for
  /// this parameter and its state.
  virtual bool reads_step_values(const torch::Tensor& parameter,
                                 const Tensors& state) const;

  /// Shape of the state `kind` of `parameter`; nullopt if it has no such state.
  virtual std::optional<std::vector<int64_t>> shape_of(
      size_t kind, const torch::Tensor& parameter) const;

  /// Type of the state `kind`. The default is the type of the parameter, or float32 with
  /// round_stochastically().
  virtual torch::ScalarType type_of(size_t kind,
                                    const torch::Tensor& parameter) const;

  /// Runs one update. May allocate scalars, and temporaries up to the size
  /// given by temporaries().
  virtual void update(const List& list, double lr) = 0;

  /// Whether the update of a value depends on no other value, and all state has the shape and
  /// type of the parameter.
  virtual bool elementwise() const;

  /// Temporary memory of update(): none, the size of the largest parameter of
  /// the list, the size of the list, or the workspace of the list. With a
  /// workspace the list has all parameters of one device and type, and update()
  /// divides it into chunks.
  enum class Temporaries { kNone, kLargest, kList, kWorkspace };
  virtual Temporaries temporaries() const = 0;

  /// Allocates the workspace of kWorkspace. Called before any value changes.
  virtual Tensors make_workspace(const List& list);

  /// Whether update_fused() can be used for lists on `device`.
  virtual bool has_fused(torch::Device device) const;
  virtual void update_fused(const List& list, double lr);
  /// Whether update_fused() changes this parameter in place while it has its copy inside
  /// (WeightCopiesOptions::split). Otherwise its values are restored first.
  virtual bool updates_split(const torch::Tensor& parameter,
                             const Tensors& state) const;

 private:
  /// A parameter with its state.
  struct Entry {
    std::string name;
    torch::Tensor parameter;
    // Updates so far, counted per parameter as in torch.optim: bias correction
    // starts with the first gradient.
    int64_t count = 0;
    Tensors state;          // by kind; undefined before the first update
    torch::Tensor block{};  // host memory of `state`; undefined: on the device
  };
  struct HostPiece;
  struct HostChunk;
  /// Parameters in bfloat16, with float32 copies of them in `list`.
  struct RoundedList {
    Tensors parameters;
    std::vector<uint64_t> seeds;
    List list;
  };

  static bool has_gradient(const Entry& entry);
  /// Restores the values of parameters that the update cannot change while they are split.
  void restore_split(const std::vector<Entry*>& entries, bool fused) const;
  std::vector<Entry*> with_gradient();
  /// Updates the entries, whose counters stay as they are.
  void apply(const std::vector<Entry*>& entries, double lr, bool partial,
             bool captured);
  /// Whether the parameter is updated in float32 and rounded.
  bool is_rounded(const torch::Tensor& parameter) const;
  /// Lists of parameters that are rounded, with everything that their update needs.
  std::vector<RoundedList> rounded_lists(
      const std::vector<Entry*>& entries) const;
  void update_rounded(const RoundedList& rounded, double lr);
  /// Runs `updates`, which must not fail for lack of memory.
  static void run_reserved(const std::function<void()>& updates);
  /// Allocates what the updates of the lists need.
  void prepare(std::vector<List>& lists, bool fused);
  /// Updates entries whose state is in host memory. Calls `before` when everything is
  /// allocated and nothing has changed.
  void apply_on_host(const std::vector<Entry*>& entries, double lr,
                     const std::function<void()>& before);
  /// Adds the values in device memory to the list of a part of an update.
  void add_step_values(List& list, const std::vector<Entry*>& entries,
                       bool captured);
  void write_step_values(int64_t missed, int64_t slot);
  bool captures() const;
  void make_state(Entry& entry) const;
  torch::Tensor make_tensor(size_t kind, const torch::Tensor& parameter) const;
  bool can_fuse(const std::vector<Entry*>& entries) const;

  // State in host memory.
  void move_to_device();
  int64_t block_bytes(const Entry& entry) const;
  int64_t state_bytes(size_t kind, const torch::Tensor& parameter) const;
  /// The state `kind` of `parameter`, as a view of `bytes`.
  torch::Tensor state_in(const torch::Tensor& bytes, size_t kind,
                         const torch::Tensor& parameter) const;
  std::vector<HostChunk> host_chunks_of(
      const std::vector<Entry*>& entries) const;
  List list_of(const HostChunk& chunk, const torch::Tensor& buffer) const;
  std::vector<detail::StateRing::Part> parts_of(
      const HostChunk& chunk, const torch::Tensor& buffer) const;

  List list_of(const std::vector<Entry*>& entries) const;
  /// Lists of parameters that together have up to `most_bytes`.
  std::vector<List> lists_of(const std::vector<Entry*>& entries,
                             size_t most_bytes) const;
  std::vector<List> lists_by_type(const std::vector<Entry*>& entries) const;
  void reserve(const std::vector<List>& lists) const;
  void update_all(const std::vector<List>& lists, bool fused, double lr);

  /// State given to load(), sorted by entry.
  struct Saved {
    int64_t step = 0;
    std::vector<std::optional<int64_t>> counts;  // if different from step
    std::vector<Tensors> tensors;                // by kind
  };
  Saved sort(const NamedTensors& state) const;
  void check_complete(const Saved& saved) const;

  std::vector<std::string> kinds_;
  std::vector<Entry> entries_;
  int64_t step_ = 0;
  std::shared_ptr<detail::HostTensors> host_;  // null: all state on the device
  bool rounds_ = false;                        // see round_stochastically()

  // Parts of an update.
  std::unordered_map<const c10::TensorImpl*, size_t> places_;  // in entries_
  double lr_ = 0;
  torch::Tensor step_values_;  // (kSlots, kStepValues); undefined if not used
  // Slot of step_values_ by the number of updates without a gradient, which
  // stays the same for a parameter that has one in every update.
  std::map<int64_t, int64_t> slots_;
};

}  // namespace reprise
