#pragma once

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

/// For source files that are compiled against a LibTorch with CUDA.
/// Tested by tests/recompute/host_memory_cuda_test.cpp.
namespace reprise::compat {

/// Returns the id of the capture that a stream is part of, or 0 if it is not
/// captured.
inline unsigned long long capture_id(const c10::cuda::CUDAStream& stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &id));
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

/// An event, recorded on one stream at construction, that other streams can
/// wait for.
class StreamEvent {
 public:
  explicit StreamEvent(const c10::cuda::CUDAStream& stream)
      : capture_(capture_id(stream)) {
    event_.record(stream);
  }
  /// Makes `stream` wait for the event.
  void block(const c10::cuda::CUDAStream& stream) {
    // Work of an abandoned capture never ran.
    if (capture_id(stream) == capture_) event_.block(stream);
  }

 private:
  unsigned long long capture_;
  at::cuda::CUDAEvent event_;
};

}  // namespace reprise::compat
