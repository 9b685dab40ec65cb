#pragma once

#include "compat/key_value_store.h"

#include <torch/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

/// c10d's process groups, whose interfaces differ between versions of LibTorch. Tested by
/// tests/distributed/group_test.cpp.
namespace reprise::compat {

/// A collective operation in progress. Copies refer to the same operation.
class Work {
 public:
  Work() = default;
  bool valid() const { return impl_ != nullptr; }
  /// Blocks until the operation has finished; on CUDA, only the current stream
  /// waits. Throws an exception if the operation failed.
  void wait();
  /// Returns whether the operation has finished.
  bool done() const;
  /// Calls `body` when the operation finishes, on a thread of the backend, or
  /// immediately if it has finished already. Returns false, and does nothing,
  /// if the backend does not support this; only Gloo does.
  bool when_done(std::function<void()> body);

 private:
  friend class ProcessGroup;
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

/// Collective operations over all ranks. Every rank must make the same calls in
/// the same order. Tensors must be contiguous and must not be used until the
/// operation has finished.
class ProcessGroup {
 public:
  struct Options {
    std::string backend = "gloo";  ///< "gloo" or "nccl"
    std::string name;              ///< prefix of the group's keys in the store
    int rank = 0;
    int size = 1;
    /// Address of this machine for Gloo; empty to resolve its host name.
    std::string address;
    std::chrono::milliseconds timeout{300'000};
    torch::Device device{torch::kCPU};  ///< device of this rank, for NCCL
  };
  /// Returns whether this build supports `backend`.
  static bool available(const std::string& backend);

  /// Throws c10::Error if the backend is not available or the ranks do not
  /// connect in time.
  ProcessGroup(std::shared_ptr<KeyValueStore> store, const Options& options);
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  /// Reduces `tensor` in place to the sum or the maximum over all ranks.
  Work all_reduce_sum(const torch::Tensor& tensor);
  Work all_reduce_max(const torch::Tensor& tensor);
  /// Copies `tensor` of rank `from` to all ranks.
  Work broadcast(const torch::Tensor& tensor, int from);
  /// Splits `input` into one part per rank, sends each part to its rank, and
  /// concatenates the received parts in `output` in the order of the ranks.
  /// Both tensors have the same size, which must be divisible by the number of
  /// ranks.
  Work all_to_all(const torch::Tensor& output, const torch::Tensor& input);
  /// Concatenates the inputs of all ranks in `output`, in the order of the
  /// ranks.
  Work all_gather(const torch::Tensor& output, const torch::Tensor& input);

  /// Sends the number `sent[r]` to each rank r, receives one of each in `got`, both of type
  /// int64 on the CPU, and returns when this is done. Gloo only. Unlike a collective, it can be
  /// given up: throws an exception if it takes longer than `timeout`, and if it fails.
  void exchange_numbers(const torch::Tensor& got, const torch::Tensor& sent,
                        std::chrono::milliseconds timeout);

  /// Shuts the group down after the last operation, as NCCL requires. Not to be
  /// called after an error.
  void shut_down();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace reprise::compat
