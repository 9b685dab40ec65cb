#include <reprise/data/sequences.h>

#include <c10/util/Exception.h>
#include <torch/types.h>

#include <algorithm>
#include <limits>
#include <string>

namespace reprise {
namespace {

/// Checks the sequences and returns the length of the longest.
int64_t check_sequences(const std::vector<torch::Tensor>& sequences,
                        const char* function) {
  TORCH_CHECK(!sequences.empty(), "[", function,
              "] expected sequences, got none");
  int64_t longest = 0;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const torch::Tensor& sequence = sequences[i];
    TORCH_CHECK(
        sequence.defined() && sequence.dim() >= 1 && sequence.dim() <= 2, "[",
        function, "] expected sequences of shape (t) or (t, D), got ",
        sequence.defined() ? c10::str("shape ", sequence.sizes())
                           : std::string("an undefined tensor"),
        " at ", i);
    const torch::Tensor& first = sequences[0];
    TORCH_CHECK(sequence.scalar_type() == first.scalar_type() &&
                    sequence.dim() == first.dim() &&
                    sequence.sizes().slice(1) == first.sizes().slice(1),
                "[", function, "] expected sequences like the first, ",
                first.scalar_type(), " of shape ", first.sizes(), ", got ",
                sequence.scalar_type(), " of shape ", sequence.sizes(), " at ",
                i, "; only their lengths may differ");
    longest = std::max(longest, sequence.size(0));
  }
  return longest;
}

}  // namespace

PaddedBatch pad_batch(const std::vector<torch::Tensor>& sequences,
                      const PadOptions& options) {
  const int64_t longest = check_sequences(sequences, "pad_batch");
  TORCH_CHECK(options.length == 0 || longest <= options.length,
              "[pad_batch] expected sequences of at most ", options.length,
              " elements, got ", longest,
              "; shorten them or choose a larger length");
  TORCH_CHECK(options.multiple > 0,
              "[pad_batch] expected a multiple above 0, got ",
              options.multiple);
  int64_t length = options.length > 0 ? options.length : longest;
  length =
      (length + options.multiple - 1) / options.multiple * options.multiple;
  const auto rows = static_cast<int64_t>(sequences.size());
  std::vector<int64_t> shape = sequences[0].sizes().vec();
  shape[0] = length;
  shape.insert(shape.begin(), rows);
  PaddedBatch batch;
  batch.values = torch::full(shape, options.value, sequences[0].options());
  batch.lengths = torch::empty({rows}, torch::kLong);
  auto* lengths = batch.lengths.data_ptr<int64_t>();
  for (int64_t i = 0; i < rows; ++i) {
    const torch::Tensor& sequence = sequences[static_cast<size_t>(i)];
    lengths[i] = sequence.size(0);
    batch.values[i].narrow(0, 0, sequence.size(0)).copy_(sequence);
  }
  batch.mask = torch::arange(length).unsqueeze(0) < batch.lengths.unsqueeze(1);
  return batch;
}

PackedBatch pack_batch(const std::vector<torch::Tensor>& sequences) {
  PackedBatch batch;
  batch.longest = check_sequences(sequences, "pack_batch");
  batch.values = torch::cat(sequences);
  const int64_t total = batch.values.size(0);
  TORCH_CHECK(total <= std::numeric_limits<int32_t>::max(),
              "[pack_batch] expected less than 2^31 elements, got ", total,
              "; use fewer samples per micro-batch");
  const auto rows = static_cast<int64_t>(sequences.size());
  batch.cu_seqlens = torch::zeros({rows + 1}, torch::kInt);
  batch.segments = torch::empty({total}, torch::kLong);
  batch.positions = torch::empty({total}, torch::kLong);
  auto* begins = batch.cu_seqlens.data_ptr<int32_t>();
  auto* segment = batch.segments.data_ptr<int64_t>();
  auto* position = batch.positions.data_ptr<int64_t>();
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t length = sequences[static_cast<size_t>(i)].size(0);
    begins[i + 1] = begins[i] + static_cast<int32_t>(length);
    for (int64_t t = 0; t < length; ++t) {
      *segment++ = i + 1;
      *position++ = t;
    }
  }
  return batch;
}

}  // namespace reprise
