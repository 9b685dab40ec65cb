#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

/// CUDA graphs: work on a device that is captured once and replayed as a whole.
/// In a build without CUDA, `cuda_graph_unavailable_reason()` is not empty,
/// nothing is ever captured, and the constructor of CudaGraph throws
/// c10::Error.
namespace reprise::compat {

/// Returns why this LibTorch does not support CUDA graphs, or an empty string
/// if it does.
std::string cuda_graph_unavailable_reason();

/// During its lifetime, this thread's work on `device` goes to a stream that
/// can be captured, unlike the default stream. The process has one such stream
/// per device, so that libraries allocate their workspaces per stream (cuBLAS)
/// only once. At both ends, the new stream waits for the old one without
/// blocking the host. Scopes nest. Does nothing if `enter` is false or if
/// `device` is the CPU.
class GraphStreamScope {
 public:
  GraphStreamScope(c10::Device device, bool enter);
  ~GraphStreamScope();
  GraphStreamScope(const GraphStreamScope&) = delete;
  GraphStreamScope& operator=(const GraphStreamScope&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;  // null if there is nothing to restore
};

/// Frees the cuBLAS workspaces of all threads and streams, which are allocated
/// again when needed. Blocks until the device is idle. Returns false, and does
/// nothing, while a CudaGraph exists, because it may use them. Does nothing for
/// the CPU.
bool release_workspaces(c10::Device device);

/// Device memory that CUDA graphs share. One graph may overwrite the memory of
/// another, so results must be copied to tensors that were allocated before the
/// capture. The memory is returned to the allocator when the last graph is
/// destroyed.
class CudaGraphPool {
 public:
  CudaGraphPool();
  ~CudaGraphPool();
  CudaGraphPool(const CudaGraphPool&) = delete;
  CudaGraphPool& operator=(const CudaGraphPool&) = delete;

 private:
  friend class CudaGraph;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// A CUDA graph on one device.
///
///     const GraphStreamScope stream(device, true);
///     CudaGraph graph(device.index(), pool);
///     graph.capture([&] { out.copy_(model(in)); });  // runs nothing
///     in.copy_(batch);
///     graph.replay();
///
/// The tensors that it reads and writes must keep their addresses. Every replay
/// uses new random numbers of the device's default generator and advances the
/// generator as if the work had been run. RngState can be used inside a
/// capture.
class CudaGraph {
 public:
  /// Creates a graph that allocates from `pool`. Throws c10::Error if `pool` is
  /// null, or if this build has no CUDA graphs.
  CudaGraph(int device, std::shared_ptr<CudaGraphPool> pool);
  /// Blocks until the device is idle.
  ~CudaGraph();
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;

  /// Captures the work that `body` launches on this thread's stream and in the
  /// backward passes that it starts. May be called once, inside a
  /// GraphStreamScope. `body` should have run on that stream before, so that
  /// libraries are initialized. Unused memory is returned to the driver first,
  /// so that the pool can use it.
  ///
  /// Exceptions of `body` propagate, and the states of the stream, the
  /// allocator and the generator are restored. If the pool has no other graph,
  /// it must not be used again.
  void capture(const std::function<void()>& body);

  /// Launches the graph on this thread's stream. Does not block.
  void replay();

  /// Returns the bytes that the capture reserved from the driver.
  int64_t bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Whether a CudaGraph is being captured in this process.
bool is_capturing();

/// Returns the offset of `generator` in the random numbers of the CUDA graph
/// that this thread is capturing, or nothing if it is not capturing on the
/// generator's device.
std::optional<uint64_t> captured_rng_offset(const at::Generator& generator);

/// Sets that offset. Throws c10::Error if nothing is being captured.
void set_captured_rng_offset(const at::Generator& generator, uint64_t position);

}  // namespace reprise::compat
