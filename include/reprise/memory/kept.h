#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace reprise {

/// Counts the memory that is kept for the backward pass, per stage: the tensors
/// that autograd saves inside a Scope, and those passed to `hold()`. A storage
/// that is shared by several tensors or stages counts once, for the lowest of
/// these stages. Model state (parameters, buffers) and views of it are not
/// counted.
///
///     KeptMeter meter(module->parameters());
///     {
///       KeptMeter::Scope scope(meter, /*stage=*/0);
///       y = module->forward(x);
///     }
///     meter.live_bytes();
///
/// Thread-safe. Saved tensors are counted until the autograd graph frees them,
/// even if the meter is destroyed earlier.
class KeptMeter {
 public:
  /// Creates a meter that ignores the storages of the tensors in `state`.
  explicit KeptMeter(at::TensorList state = {});

  int64_t live_bytes() const;  ///< bytes kept now
  int64_t peak_bytes() const;  ///< maximum since construction or restart_peak()

  /// Live bytes of each stage.
  std::vector<int64_t> live_by_stage() const;

  /// One storage that is kept now.
  struct Storage {
    const void* storage;  ///< address of the StorageImpl
    int64_t bytes;
    int stage;  ///< lowest stage that keeps it
  };
  /// Returns all storages that are kept now, in no particular order.
  std::vector<Storage> live_storages() const;

  /// Resets the peak to the bytes kept now.
  void restart_peak();

  /// Counts `tensor` for `stage` until the result is destroyed. The result
  /// keeps the tensor's memory alive.
  std::shared_ptr<void> hold(const at::Tensor& tensor, int stage) const;

  /// During its lifetime, tensors that autograd saves on this thread are
  /// counted for `stage`, which must not be negative (c10::Error). Scopes nest.
  class Scope {
   public:
    Scope(const KeptMeter& meter, int stage);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
  };

  /// The meter and stage for which this thread's saved tensors are counted.
  /// `meter` is null outside of any Scope. Allows code that saves tensors
  /// outside of autograd, such as checkpoint(), to count them.
  struct Target {
    std::shared_ptr<KeptMeter> meter;
    int stage = 0;
  };
  static Target current();

 private:
  struct State;
  friend class KeptHooks;
  friend class KeptPolicy;
  explicit KeptMeter(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

}  // namespace reprise
