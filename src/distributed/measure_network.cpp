#include "distributed/measure_network.h"

#include "compat/cuda.h"
#include "compat/process_group.h"
#include "recompute/stage_parameters.h"

#include <algorithm>
#include <array>
#include <chrono>

namespace reprise::detail {
namespace {

constexpr int64_t kSmallBytes = 4096;
constexpr int kSmallTimes = 20;
/// Shorter measurements do not show the speed of a link that lets bursts pass.
constexpr double kLongMs = 200;
constexpr int kMostTimes = 256;

/// Buffers of one operation.
struct Buffers {
  torch::Tensor input, output;
};

compat::Work start(RankGroup& group, Collective collective,
                   const Buffers& buffers) {
  switch (collective) {
    case Collective::kAllReduce:
      return group.all_reduce(buffers.output);
    case Collective::kAllToAll:
      return group.all_to_all(buffers.output, buffers.input);
    case Collective::kAllGather:
      return group.all_gather(buffers.output, buffers.input);
  }
  return {};
}

/// Milliseconds per operation if `times` of them follow each other, two at a time.
double time_of(RankGroup& group, torch::Device device, Collective collective,
               int64_t bytes, int times) {
  using Clock = std::chrono::steady_clock;
  const int64_t share = std::max<int64_t>(1, bytes / group.size() / 4);
  const auto options = torch::dtype(torch::kFloat).device(device);
  std::array<Buffers, 2> buffers;
  for (Buffers& one : buffers) {
    const bool gathers = collective == Collective::kAllGather;
    one.input = torch::zeros({gathers ? share : share * group.size()}, options);
    one.output = torch::zeros({share * group.size()}, options);
  }
  group.all_reduce_max({0});  // begin together
  const auto begin = Clock::now();
  compat::Work previous;
  for (int i = 0; i < times; ++i) {
    auto work = start(group, collective, buffers[static_cast<size_t>(i % 2)]);
    if (previous.valid()) group.wait(previous);
    previous = work;
  }
  group.wait(previous);
  compat::synchronize(device);
  const std::chrono::duration<double, std::milli> ms = Clock::now() - begin;
  // Threads of the backend may refer to them until after the training has begun.
  for (const Buffers& one : buffers) {
    set_storage_memory(one.input, nullptr);
    set_storage_memory(one.output, nullptr);
  }
  return group.all_reduce_sum({ms.count() / times})[0] / group.size();
}

}  // namespace

Network measure_network(RankGroup& group, torch::Device device,
                        Collective collective, int64_t bytes) {
  if (group.size() < 2) return {};
  const torch::NoGradGuard no_grad;
  const auto ms_of = [&](int64_t size, int times) {
    return time_of(group, device, collective, size, times);
  };
  ms_of(kSmallBytes, 4);  // connects
  const double small = ms_of(kSmallBytes, kSmallTimes);
  int times = 4;
  double large = ms_of(bytes, times);
  while (large * times < kLongMs && times < kMostTimes) {
    times *= 4;
    large = ms_of(bytes, times);
  }
  const double steps =
      (group.size() - 1) * (collective == Collective::kAllReduce ? 2 : 1);
  Network network;
  network.latency_ms = small / steps;
  const double sending = std::max((large - small) / steps, 1e-6);
  network.bytes_per_ms = static_cast<double>(bytes) / group.size() / sending;
  return network;
}

}  // namespace reprise::detail
