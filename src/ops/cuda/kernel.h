#pragma once

/// Declares the function that launches a kernel on `stream`, a cudaStream_t:
///
///     REPRISE_KERNEL(add_norm_forward, AddNormForward);
///
/// `Arguments` is a struct of sizes and device pointers. Launch functions do not wait for
/// the device, and throw std::runtime_error if the launch fails. no_cuda.cpp redefines
/// the macro, which then defines a function that throws: a kernel needs no stub of its
/// own in builds without nvcc. Tested by tests/ops/kernels_test.cpp.
#ifndef REPRISE_KERNEL
#define REPRISE_KERNEL(name, Arguments) \
  void name(const Arguments& arguments, void* stream)
#endif
