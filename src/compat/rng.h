#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace reprise::compat {

/// A copy of the states of random generators. A state that is recorded during
/// the capture of a CUDA graph is an offset into that graph's random numbers,
/// and can only be restored during the same capture. The copy of a CPU
/// generator's state is not a tensor, so that it does not count as tensor
/// memory.
class RngState {
 public:
  RngState() = default;

  /// Copies the states of the CPU's default generator, of the default
  /// generators of the CUDA devices of `tensors`, and of `extra`. Takes a few
  /// microseconds. Thread-safe.
  static RngState capture(at::TensorList tensors,
                          const std::vector<at::Generator>& extra = {});

  /// Copies the current states of the generators of `other`.
  static RngState capture_like(const RngState& other);

  /// Sets the generators to these states.
  void restore() const;

  /// Removes the generators whose states are equal in `other`, which must have
  /// the same generators.
  void forget_unchanged(const RngState& other);

  /// Returns whether it has no generators.
  bool empty() const { return entries_.empty(); }

  /// Returns the states as byte tensors, in the order of the generators.
  std::vector<at::Tensor> states() const;

  /// Returns the same generators with other states, as returned by states().
  /// Throws c10::Error if their number differs.
  RngState with_states(const std::vector<at::Tensor>& states) const;

  /// Returns whether generators and states are equal.
  bool operator==(const RngState& other) const;

 private:
  struct CpuState;
  struct Entry {
    at::Generator generator;
    std::shared_ptr<const CpuState> cpu;  // state of a CPU generator
    at::Tensor state;  // state of any other: bytes on the CPU
    bool in_graph = false;
  };
  static Entry entry_of(at::Generator generator);
  static bool same_state(const Entry& a, const Entry& b);
  std::vector<Entry> entries_;
};

/// Restores `state` at construction and the previous states at destruction.
class RngGuard {
 public:
  explicit RngGuard(const RngState& state);
  ~RngGuard();
  RngGuard(const RngGuard&) = delete;
  RngGuard& operator=(const RngGuard&) = delete;

 private:
  RngState before_;
};

}  // namespace reprise::compat
