#pragma once

#include <torch/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

/// c10d's store and process groups, whose classes differ between versions of
/// LibTorch.
namespace reprise::compat {

/// Small values that all ranks can read: a TCPStore. Calls of several threads wait
/// for each other, also for one that waits for a key.
class Store {
 public:
  struct Options {
    std::string host = "127.0.0.1";
    int port = 0;
    bool serve = false;  ///< this process holds it
    std::chrono::milliseconds timeout{300'000};
  };
  /// Throws c10::Error where nobody answers within the timeout.
  explicit Store(const Options& options);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  void set(const std::string& key, const std::string& value);
  /// Nothing where nobody has set it; does not wait.
  std::optional<std::string> find(const std::string& key);
  /// Adds to a counter that begins at 0; returns what it is then.
  int64_t add(const std::string& key, int64_t value);

 private:
  friend class ProcessGroup;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// A collective under way. Copies are the same one.
class Work {
 public:
  Work() = default;
  bool valid() const { return impl_ != nullptr; }
  /// Waits for it; on CUDA only the current stream does. Throws what went wrong.
  void wait();
  bool done() const;
  /// Calls `body` when it is over, on a thread of the backend or, where it is over
  /// already, here. Gloo alone; false: it cannot be told.
  bool when_done(std::function<void()> body);

 private:
  friend class ProcessGroup;
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

/// The same calls in the same order on every rank. Tensors are contiguous, and stay
/// untouched until the work is over.
class ProcessGroup {
 public:
  struct Options {
    std::string backend = "gloo";  ///< gloo, nccl
    std::string name;              ///< keeps groups of one store apart
    int rank = 0;
    int size = 1;
    /// Gloo's address of this machine as others reach it; empty: by its host name.
    std::string address;
    std::chrono::milliseconds timeout{300'000};
    torch::Device device{torch::kCPU};  ///< nccl
  };
  /// Whether this LibTorch, as it was built against, has `backend`.
  static bool available(const std::string& backend);

  ProcessGroup(Store& store, const Options& options);
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  Work sum(const torch::Tensor& tensor);
  Work max(const torch::Tensor& tensor);
  Work broadcast(const torch::Tensor& tensor, int from);
  /// `output` gets part `rank` of the others' inputs, one after the other by rank;
  /// both have as many bytes, which can be divided by the ranks.
  Work all_to_all(const torch::Tensor& output, const torch::Tensor& input);
  /// `output` gets the inputs of all, one after the other by rank.
  Work all_gather(const torch::Tensor& output, const torch::Tensor& input);

  /// After the last work, where all went well: NCCL wants to be told.
  void shut_down();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace reprise::compat
