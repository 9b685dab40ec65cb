#pragma once

#include "memory/host_tensors.h"
#include "recompute/stage_parameters.h"

#include <reprise/recompute/chain.h>

#include <torch/types.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_set>
#include <vector>

namespace reprise::detail {

/// Parameters of a chain in host memory, which are copied in and dropped again. Gradients that a
/// backward leaves, and parameters that were updated in it, are copied back. Results do not
/// depend on the place.
///
///     HostParameters host(chain, device, memory);
///     host.move_to_host();
///
/// Readable makes all parameters readable outside of the chain. Parameters that several stages
/// use, small ones and weights of convolutions stay on the device. After abandon(), gradients
/// of stages whose backward had not ended are those from before. Not thread-safe. Tested by
/// tests/recompute/host_parameters_test.cpp.
class HostParameters final : public StageParameters {
 public:
  /// Keeps the parameters of `chain`; moves nothing.
  HostParameters(const Chain& chain, torch::Device device,
                 std::shared_ptr<HostTensors> memory);
  /// Parameters that are in host memory become tensors of the CPU.
  ~HostParameters() override;

  /// Moves the parameters to host memory, from the device or from the CPU. Returns false, with
  /// nothing changed, if it has no room.
  bool move_to_host();
  /// Allocates host memory for gradients that stay from one micro-batch to the next. Returns
  /// false if there is none; the first backward allocates it otherwise.
  bool reserve_gradients();
  /// Frees that memory, unless there are gradients in it.
  void release_gradients();
  /// Moves the parameters to the device. Throws c10::Error, with nothing changed, if it has no
  /// room.
  void move_to_device();
  bool on_host() const { return on_host_; }
  bool away() const override { return on_host_; }

  /// Whether `parameter` is one of those that are moved.
  bool moves(const torch::Tensor& parameter) const;
  /// Bytes of the moved parameters, by stage.
  const std::vector<int64_t>& stage_bytes() const { return stage_bytes_; }
  /// Bytes of the gradients of the moved parameters that require one, by stage.
  const std::vector<int64_t>& stage_gradient_bytes() const {
    return stage_gradient_bytes_;
  }
  /// Bytes of parameters and gradients in host memory.
  int64_t host_bytes() const;
  void abandon() override;
  /// Drops the gradients in host memory.
  void forget_gradients();

  /// While it exists, parameters and gradients in host memory are tensors of the CPU, which
  /// can be read and written, and gradients be set after reserve_gradients(). For use between
  /// micro-batches.
  class Readable {
   public:
    explicit Readable(HostParameters* host);  ///< may be null
    ~Readable();
    Readable(const Readable&) = delete;
    Readable& operator=(const Readable&) = delete;

   private:
    HostParameters* host_;  // null: nothing to do
  };

 private:
  /// A parameter that is moved.
  struct Moved {
    torch::Tensor parameter;
    int64_t place = 0;           // of its storage in the stage's block
    int64_t gradient_place = 0;  // in the block of gradients
    int64_t version = 0;         // when it was brought in
    bool gradient = false;       // whether host memory has its gradient
    bool fetched = false;        // whether that gradient was brought in
    torch::Tensor shell{};       // holds the storage while Readable exists
  };
  struct StageMemory {
    std::vector<Moved> parameters;
    int64_t bytes = 0, gradient_bytes = 0;
    torch::Tensor block{}, gradient_block{};  // host memory
    torch::Tensor values{};  // on the device; undefined: absent
    std::unique_ptr<HostTensors::Event> fetched{};  // not waited for yet
  };
  /// Device memory that is being copied to the host.
  struct Leaving {
    std::vector<torch::Tensor> tensors;
    std::unique_ptr<HostTensors::Event> end;
  };

  StageMemory& at(int stage) { return stages_[static_cast<size_t>(stage)]; }
  void start_fetch(size_t unit, bool backward) override;
  void finish_fetch(size_t unit) override;
  void leave(size_t unit) override;
  void wait_for_left(size_t remaining) override;
  bool readable() const override { return readable_ > 0; }
  /// Throws c10::OutOfMemoryError if there is no host memory for gradients.
  void check_gradients_reserved();
  /// Part of a block of memory as a tensor like `parameter`, whose storage begins at `place`.
  static torch::Tensor view_in(const torch::Tensor& block, int64_t place,
                               const torch::Tensor& parameter);
  static torch::Tensor values_of(const StageMemory& stage, const Moved& moved) {
    return view_in(stage.block, moved.place, moved.parameter);
  }
  static torch::Tensor gradient_of(const StageMemory& stage,
                                   const Moved& moved) {
    return view_in(stage.gradient_block, moved.gradient_place, moved.parameter);
  }
  void set_memory(const StageMemory& stage, const torch::Tensor& values) const;
  /// Whether parameters of a stage that is there were updated.
  static bool is_updated(const StageMemory& stage);
  void open();
  void close();

  torch::Device device_;
  std::shared_ptr<HostTensors> memory_;
  std::vector<StageMemory> stages_;
  std::unordered_set<const void*> moved_;  // TensorImpl of each
  std::vector<int64_t> stage_bytes_, stage_gradient_bytes_;
  bool on_host_ = false;
  int readable_ = 0;
  std::deque<Leaving> leaving_;
};

}  // namespace reprise::detail
