#pragma once

#include "compat/cuda_graph.h"

#include <c10/util/Exception.h>

/// Stands in for graphs where this LibTorch has none: for one source of a build,
/// which says why.
namespace reprise::compat {

struct GraphStreamScope::Impl {};
GraphStreamScope::GraphStreamScope(c10::Device, bool) {}
GraphStreamScope::~GraphStreamScope() = default;

bool release_workspaces(c10::Device) {
  return true;
}

struct CudaGraphPool::Impl {};
CudaGraphPool::CudaGraphPool() = default;
CudaGraphPool::~CudaGraphPool() = default;

struct CudaGraph::Impl {};
CudaGraph::CudaGraph(int, std::shared_ptr<CudaGraphPool>) {
  TORCH_CHECK(false, "[CudaGraph] ", cuda_graph_refusal());
}
CudaGraph::~CudaGraph() = default;
void CudaGraph::capture(const std::function<void()>&) {}
void CudaGraph::replay() {}
int64_t CudaGraph::bytes() const {
  return 0;
}

std::optional<uint64_t> captured_position(const at::Generator&) {
  return std::nullopt;
}

void set_captured_position(const at::Generator&, uint64_t) {
  TORCH_CHECK(false, "[RngState] nothing is being captured");
}

}  // namespace reprise::compat
