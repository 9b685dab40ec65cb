#pragma once

#include <reprise/base/enum_text.h>

#include <array>
#include <string_view>

/// Choices of a training that its costs depend on. The planner makes them or takes them as
/// given, and a Plan carries them to the trainer.
namespace reprise {

/// Type of activations and of matrix products.
enum class Precision { kFp32, kBf16, kFp16 };

template <>
struct EnumText<Precision> {
  static constexpr std::array<std::string_view, 3> names{"fp32", "bf16",
                                                         "fp16"};
};

/// Use of CUDA graphs for the micro-step. kAuto: on CUDA, if the micro-step can be
/// captured and the graph fits in the memory budget.
enum class GraphMode { kAuto, kOn, kOff };

template <>
struct EnumText<GraphMode> {
  static constexpr std::array<std::string_view, 3> names{"auto", "on", "off"};
};

/// When parameters are updated. kAfter: after the backward of the window. kBackward: each as
/// soon as its gradient is final, which frees the gradient at once; for windows of one
/// micro-batch. The results are the same. kAuto: kAfter, or kBackward if a plan for the memory
/// budget is faster with it or has no other way to fit.
enum class UpdateMode { kAuto, kAfter, kBackward };

template <>
struct EnumText<UpdateMode> {
  static constexpr std::array<std::string_view, 3> names{"auto", "after",
                                                         "backward"};
};

/// Memory of the training's state. kHost: the optimizer's state is in host memory, from which
/// an update streams it through the device in chunks. kHostAll: parameters and gradients are
/// there as well, and those of a stage are on the device only while it runs; parameters are
/// updated in the backward of the window's last micro-batch. The results are the same. kAuto:
/// kDevice, or one of the others if a plan for the memory budget is better with it.
enum class StatePlace { kAuto, kDevice, kHost, kHostAll };

template <>
struct EnumText<StatePlace> {
  static constexpr std::array<std::string_view, 4> names{"auto", "device",
                                                         "host", "host-all"};
};

/// What is divided among ranks instead of replicated; each includes those before it.
enum class Sharding { kNone, kOptimizer, kGradients, kParameters };

template <>
struct EnumText<Sharding> {
  static constexpr std::array<std::string_view, 4> names{
      "none", "optimizer", "gradients", "parameters"};
};

/// Sums of gradients over the micro-batches of a window. kBf16: rounded stochastically to
/// bfloat16 after each micro-batch but the last, which takes half of the memory and changes
/// results; parameters are updated in the backward of the last micro-batch.
enum class GradientSums { kFp32, kBf16 };

template <>
struct EnumText<GradientSums> {
  static constexpr std::array<std::string_view, 2> names{"fp32", "bf16"};
};

/// Type of the linear layers' weights. kBf16: bfloat16, updated in float32 and rounded
/// stochastically, which takes half of the memory and changes results.
enum class ParameterType { kFp32, kBf16 };

template <>
struct EnumText<ParameterType> {
  static constexpr std::array<std::string_view, 2> names{"fp32", "bf16"};
};

/// What the time of a micro-batch depends on: the device's arithmetic and memory, copies between
/// device and host, or the host, which submits the device's work.
enum class TimeBound { kArithmetic, kLink, kHost };

template <>
struct EnumText<TimeBound> {
  static constexpr std::array<std::string_view, 3> names{"arithmetic", "link",
                                                         "host"};
};

/// Half-precision copies of the linear layers' weights (WeightCopies). kOn: one
/// copy per window. kSplit: bfloat16 copies inside the weights, which take no memory.
/// kEach: a conversion at each use, which takes none either. kAuto: kOn on CUDA, or one of
/// the others if a plan for the memory budget is better with it.
enum class WeightCopiesMode { kAuto, kOn, kSplit, kEach, kOff };

template <>
struct EnumText<WeightCopiesMode> {
  static constexpr std::array<std::string_view, 5> names{"auto", "on", "split",
                                                         "each", "off"};
};

/// Memory layout of images and convolution weights: NCHW, or NHWC, which tensor cores
/// prefer. Results are the same up to rounding. kAuto: the faster one on CUDA, kPlanes on
/// the CPU.
enum class ImageLayout { kAuto, kPlanes, kChannelsLast };

template <>
struct EnumText<ImageLayout> {
  static constexpr std::array<std::string_view, 3> names{"auto", "planes",
                                                         "channels-last"};
};

/// Whether cuDNN tries its algorithms for each new shape and uses the fastest. kAuto: if
/// that makes the micro-step faster.
enum class Autotune { kAuto, kOn, kOff };

template <>
struct EnumText<Autotune> {
  static constexpr std::array<std::string_view, 3> names{"auto", "on", "off"};
};

/// Settings that do not change what a training computes, except for rounding, but its speed
/// and memory.
struct DeviceSettings {
  ImageLayout layout = ImageLayout::kAuto;
  Autotune autotune = Autotune::kAuto;

  bool operator==(const DeviceSettings&) const = default;
};

}  // namespace reprise
