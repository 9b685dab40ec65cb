#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace reprise::compat {

/// A copy of the state of some random generators. One that is taken while a CUDA
/// graph is captured is a place in that graph's random numbers and can be put back
/// in the same capture only; in each replay the numbers there are the same again.
/// The copy of a CPU generator is no tensor: neither holding nor taking it shows in
/// the memory of tensors, which a training's budget counts.
class RngState {
 public:
  RngState() = default;

  /// The CPU's default generator, those of the CUDA devices of `tensors`, and
  /// `extra` ones. Thread-safe; costs a few microseconds.
  static RngState capture(at::TensorList tensors,
                          const std::vector<at::Generator>& extra = {});

  /// The same generators as `other`'s, as they are now.
  static RngState capture_like(const RngState& other);

  /// Puts the generators back into this state.
  void restore() const;

  /// Forgets the generators whose state is the same in `other`, which must hold
  /// the same generators.
  void forget_unchanged(const RngState& other);

  /// The states as byte tensors, in the order of the generators.
  std::vector<at::Tensor> states() const;

  /// The same generators in these states, as `states()` gave them. Throws
  /// c10::Error where their number differs.
  RngState with_states(const std::vector<at::Tensor>& states) const;

  /// Same generators in the same states.
  bool operator==(const RngState& other) const;

 private:
  struct CpuState;
  struct Entry {
    at::Generator generator;
    std::shared_ptr<const CpuState> cpu;  // of a CPU generator
    at::Tensor state;                     // of any other: bytes, on the CPU
    bool in_graph = false;
  };
  static Entry entry_of(at::Generator generator);
  static bool same_state(const Entry& a, const Entry& b);
  std::vector<Entry> entries_;
};

/// Restores `state` now, and on destruction what was there before.
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
