#pragma once

#include "compat/rng.h"
#include "compat/saved_tensors.h"
#include "recompute/host_saves.h"

#include <reprise/recompute/checkpoint.h>
#include <reprise/recompute/stage.h>

#include <ATen/core/Generator.h>
#include <c10/core/TensorImpl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace reprise::detail {

class CheckpointFrame;

/// The calls of keep() in one checkpointed function. Tested by
/// tests/recompute/keep_test.cpp.
///
/// Note [Kept calls]
/// The graph that the backward uses is that of the first run; a recomputation
/// only fills the slots of the tensors that this graph saved. A function need
/// not run again if everything that its graph saved is available:
///
/// - A saved tensor that shares the memory of one of the function's inputs is a
///   slot like any other. The recomputation has the input when it reaches the
///   call, and stores it (or the same view of it) in the slot.
/// - Any other saved tensor is kept, and so are the outputs, which the code
///   after the call needs. They are packed by the hooks that surround the
///   checkpoint, like its inputs. A meter therefore counts them, an outer
///   checkpoint drops them, and a run without a backward holds nothing.
///
/// A linear layer thus keeps its output, and fused attention its output and the
/// normalization of its weights. The recomputation also sets the random
/// generators to their states after the call.
class KeptCalls {
 public:
  using Function = std::function<Tensors(const Tensors&)>;

  /// Memory that holds the values of a call.
  enum class Place { kDevice, kHost };

  explicit KeptCalls(const CheckpointOptions& options)
      : names_(options.keep_names),
        generators_(options.generators),
        store_(options.offload_store),
        offload_(options.offload) {}

  /// Called before and after the first run. begin() records the hooks that
  /// surround the checkpoint. finish() throws c10::Error if a name of the
  /// constructor's list did not occur; call it while the outputs are held.
  void begin();
  void finish();
  /// Called before each recomputation.
  void restart() { next_ = 0; }

  /// Returns whether calls of this name are kept.
  bool keeps(const std::string& name) const;
  /// Called for each call of keep() in the first run.
  void record_name(const std::string& name) { seen_.push_back(name); }

  Tensors first_run(CheckpointFrame& frame, const std::string& name,
                    const Function& function, const Tensors& inputs,
                    Place place);

  /// Returns the outputs of the corresponding call of the first run.
  Tensors replay(CheckpointFrame& frame, const std::string& name,
                 const Tensors& inputs);

 private:
  friend class KeepHooks;
  friend class KeepPolicy;

  struct Output {
    std::unique_ptr<compat::SavedTensorHooks> hooks;  // null if undefined
    bool requires_grad = false;
    std::optional<c10::VariableVersion> counter{};
    uint32_t version = 0;  // of the counter when it was kept
  };
  /// A tensor that the function saved and that shares memory with an input.
  struct SavedInput {
    size_t input;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
    int64_t offset;  // from the beginning of the input
  };
  struct Call {
    std::string name;
    Place place = Place::kDevice;
    std::vector<Output> outputs;
    std::vector<SavedInput> saved_inputs;  // in the order of saving
    compat::RngState rng;  // after the call, of generators that it used
  };

  /// Returns hooks that keep the tensor that they pack.
  std::unique_ptr<compat::SavedTensorHooks> make_hooks(Place place) const;
  Output keep_output(const torch::Tensor& output, Place place) const;

  std::optional<std::vector<std::string>> names_;
  std::vector<at::Generator> generators_;
  std::shared_ptr<HostStore> store_;  // for offload(); may be null
  HostOptions offload_;
  // During the first run: the hooks around the checkpoint, and those that move
  // tensors to the store.
  std::shared_ptr<compat::SavedTensorPolicy> outer_;
  std::optional<HostSaves> host_;
  std::vector<std::string> seen_;  // names, in the order of the calls
  std::vector<Call> calls_;
  size_t next_ = 0;  // the call that a recomputation reaches next
};

}  // namespace reprise::detail
