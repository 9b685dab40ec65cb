#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

/// Checksums in the header of a safetensors file. They are a value of its metadata, which
/// other programs ignore: 16 hexadecimal digits for the header itself, as if these were zeros,
/// followed by 16 for each tensor, in the order of their names.
///
/// The header is written first but depends on the tensors. It therefore begins with zeros
/// and is written again at the end, with the same length. Tested by
/// tests/data/safetensors_test.cpp.
namespace reprise::detail {

constexpr const char* kChecksumsKey = "reprise-checksums";

using TensorChecksums = std::map<std::string, uint64_t>;  // by name

/// The value of the metadata before the checksums are known.
std::string empty_checksums(size_t tensors);

/// Puts the checksums into a header that has empty_checksums().
void fill_checksums(std::string& header, const TensorChecksums& tensors);

/// Returns the checksums of the tensors, whose names are those of `tensors`, from the `value`
/// of the metadata. Returns nullopt if the header does not fit its own checksum.
std::optional<TensorChecksums> parse_checksums(std::string header,
                                               const std::string& value,
                                               TensorChecksums tensors);

}  // namespace reprise::detail
