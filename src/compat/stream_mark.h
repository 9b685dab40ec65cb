#pragma once

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

/// For the sources that are compiled against a LibTorch with CUDA.
namespace reprise::compat {

/// Which capture a stream is part of; 0: none.
inline unsigned long long capture_of(const c10::cuda::CUDAStream& stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &id));
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

/// A moment of one stream that others wait for.
class StreamMark {
 public:
  explicit StreamMark(const c10::cuda::CUDAStream& stream)
      : capture_(capture_of(stream)) {
    event_.record(stream);
  }
  void hold_back(const c10::cuda::CUDAStream& stream) {
    // What belongs to a capture that was given up never ran.
    if (capture_of(stream) == capture_) event_.block(stream);
  }

 private:
  unsigned long long capture_;
  at::cuda::CUDAEvent event_;
};

}  // namespace reprise::compat
