// Tested by tests/data/dataset_test.cpp.
#include "base/checksum.h"

#include <reprise/data/dataset.h>

#include <fmt/format.h>

#include <algorithm>

namespace reprise {
namespace {

constexpr int64_t kMostSamples = 512;
constexpr size_t kMostBytes = size_t{16} << 20;

/// Adds the shape and the values. Returns the number of bytes.
size_t add(Checksum& sum, const torch::Tensor& tensor) {
  if (!tensor.defined()) return 0;
  const torch::Tensor plain = tensor.cpu().contiguous();
  const auto shape = plain.sizes();
  sum.add(shape.data(), shape.size() * sizeof(shape[0]));
  sum.add(plain.data_ptr(), plain.nbytes());
  return plain.nbytes();
}

}  // namespace

std::string sample_fingerprint(const Dataset& data) {
  const int64_t size = data.size();
  const int64_t count = std::min(size, kMostSamples);
  Checksum sum;
  sum.add(&size, sizeof size);
  size_t bytes = 0;
  for (int64_t i = 0; i < count && bytes < kMostBytes; ++i) {
    // From both ends towards the middle, should the samples be too large for all of them.
    const int64_t place = i % 2 == 0 ? i / 2 : count - 1 - i / 2;
    const int64_t index =
        count == 1 ? 0
                   : static_cast<int64_t>(static_cast<double>(place) /
                                          static_cast<double>(count - 1) *
                                          static_cast<double>(size - 1));
    const Batch batch = data.get({std::min(index, size - 1)});
    for (const torch::Tensor& tensor : batch.tensors) {
      bytes += add(sum, tensor);
    }
  }
  return fmt::format("{}-{:016x}", size, sum.value());
}

}  // namespace reprise
