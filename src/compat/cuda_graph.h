#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

/// Work on a CUDA device that is recorded once and launched again as a whole. In
/// a build without CUDA `cuda_graph_refusal()` says so, nothing is ever being
/// captured, and graphs cannot be made.
namespace reprise::compat {

/// Why this LibTorch cannot make graphs; empty where it can.
std::string cuda_graph_refusal();

/// While it lives, this thread's work on `device` goes to one stream, the same in
/// the whole process, that is not the default one, on which nothing can be
/// captured. On one stream for all work, what libraries keep a stream (cuBLAS's
/// workspaces) is there once. Work before waits on the device, not on the host, at
/// both ends. Scopes nest. Does nothing where `enter` is false or for the CPU.
class GraphStreamScope {
 public:
  GraphStreamScope(c10::Device device, bool enter);
  ~GraphStreamScope();
  GraphStreamScope(const GraphStreamScope&) = delete;
  GraphStreamScope& operator=(const GraphStreamScope&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;  // null: nothing to put back
};

/// Lets go of what libraries (cuBLAS) keep to work in, of all threads and streams; each
/// takes its own again when it needs it. Waits for the device. False, and nothing done,
/// while there is a graph, which may use it. On the CPU there is nothing to do.
bool release_workspaces(c10::Device device);

/// Device memory that graphs share. What one graph uses while it runs, the next one
/// uses too, so results have to leave it: into tensors made before the capture.
/// Goes back to the allocator with the last graph.
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

/// One recorded piece of work on one device.
///
///     const GraphStreamScope stream(device, true);
///     CudaGraph graph(device.index(), pool);
///     graph.capture([&] { out.copy_(model(in)); });  // runs nothing
///     in.copy_(batch);
///     graph.replay();
///
/// The tensors it reads and writes must stay where they are. Random numbers of the
/// device's default generator are new in every replay, and the generator moves on
/// as if the work had been run; RngState works inside a capture.
class CudaGraph {
 public:
  /// `pool` is shared with the graphs made from it.
  CudaGraph(int device, std::shared_ptr<CudaGraphPool> pool);
  /// Waits for the device: a graph that still runs finishes.
  ~CudaGraph();
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;

  /// Records what `body` launches on this thread's stream and in the backwards
  /// that it starts; once. Needs a GraphStreamScope. `body` should have run before
  /// on that stream, so that libraries are set up. Whatever throws in it passes
  /// through, and all is as before: the stream, the allocator, the generator; a
  /// pool that holds no other graph is used up then. Unused memory is given back
  /// to the driver first, so that the pool can have it.
  void capture(const std::function<void()>& body);

  /// Launches it on this thread's stream; does not wait.
  void replay();

  /// By which the capture made the memory taken from the driver grow.
  int64_t bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Where `generator` stands in the random numbers of the graph into which this
/// thread's work is being captured; nothing where none is, or not on its device.
std::optional<uint64_t> captured_position(const at::Generator& generator);

/// Puts it there. Throws c10::Error where nothing is being captured.
void set_captured_position(const at::Generator& generator, uint64_t position);

}  // namespace reprise::compat
