#pragma once

#include "compat/cuda_graph.h"

#include <c10/util/Exception.h>

/// Definitions of cuda_graph.h for a LibTorch without CUDA graphs. To be
/// included by one source file, which defines cuda_graph_unavailable_reason().
/// Tested by tests/compat/cuda_graph_test.cpp.
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
  TORCH_CHECK(false, "[CudaGraph] ", cuda_graph_unavailable_reason());
}
CudaGraph::~CudaGraph() = default;
void CudaGraph::capture(const std::function<void()>&) {}
void CudaGraph::replay() {}
int64_t CudaGraph::bytes() const {
  return 0;
}

bool is_capturing() {
  return false;
}

std::optional<uint64_t> captured_rng_offset(const at::Generator&) {
  return std::nullopt;
}

void set_captured_rng_offset(const at::Generator&, uint64_t) {
  TORCH_CHECK(false, "[RngState] nothing is being captured");
}

}  // namespace reprise::compat
