#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace reprise {

/// Counts what is kept for the backward pass, by stage: the tensors autograd
/// saves inside a Scope, and those handed to `hold()`. A storage that several
/// tensors or stages share counts once, for the lowest stage that has it.
/// Model state (parameters, buffers) and its views never count.
///
///     KeptMeter meter(module->parameters());
///     {
///       KeptMeter::Scope scope(meter, /*stage=*/0);
///       y = module->forward(x);
///     }
///     meter.live_bytes();
///
/// Thread-safe. What was saved goes on counting until the graph frees it, even
/// after the meter itself is gone.
class KeptMeter {
 public:
  /// `state`: tensors whose storages are never counted.
  explicit KeptMeter(at::TensorList state = {});

  int64_t live_bytes() const;
  int64_t peak_bytes() const;

  /// Live bytes of each stage.
  std::vector<int64_t> live_by_stage() const;

  /// What is live now, storage by storage.
  struct Storage {
    const void* storage;  ///< address of its StorageImpl
    int64_t bytes;
    int stage;
  };
  std::vector<Storage> live_storages() const;

  /// Begins a new peak from what is live now.
  void restart_peak();

  /// Counts `tensor` for `stage` until the result is destroyed. Holds the
  /// tensor's memory alive.
  std::shared_ptr<void> hold(const at::Tensor& tensor, int stage) const;

  /// While it lives, what autograd saves on this thread counts for `stage`.
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

  /// Where this thread's savings count at present; null outside any Scope.
  /// Lets code that keeps tensors for autograd (checkpoint) count them too.
  struct Place {
    std::shared_ptr<KeptMeter> meter;
    int stage = 0;
  };
  static Place current();

 private:
  struct State;
  friend class KeptHooks;
  friend class KeptPolicy;
  explicit KeptMeter(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

}  // namespace reprise
