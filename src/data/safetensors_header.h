#pragma once

#include "base/input_file.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

/// The header of a safetensors file. Does not use LibTorch. Tested by
/// tests/data/safetensors_test.cpp.
namespace reprise::detail {

/// The limit of the reference implementation.
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr const char* kMetadataKey = "__metadata__";

struct HeaderEntry {
  std::string type;  ///< as the file names it: "F32"
  std::vector<int64_t> shape;
  uint64_t begin = 0;  ///< first byte, counted from the end of the header
  uint64_t end = 0;    ///< one past the last byte
};

struct SafeTensorsHeader {
  std::map<std::string, HeaderEntry> entries;
  std::map<std::string, std::string> metadata;
  uint64_t data_begin = 0;  ///< of the file
  std::string text;         ///< as it is in the file
};

/// Reads and checks the header: every byte of the data belongs to exactly one tensor, whose
/// size fits its type and shape. Throws reprise::Error with the path.
SafeTensorsHeader read_safetensors_header(const InputFile& file);

}  // namespace reprise::detail
