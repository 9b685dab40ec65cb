#pragma once

#include "support.h"
#include "temporary.h"

#include <reprise/data/dataset.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>
#include <zlib.h>

/// Helpers that write small data files.
namespace reprise::testing {

using Folder = TemporaryDirectory;

inline void write_bytes(const std::string& path, const std::string& bytes) {
  std::filesystem::create_directories(
      std::filesystem::path(path).parent_path());
  std::ofstream(path, std::ios::binary) << bytes;
}

inline void write_gzipped(const std::string& path, const std::string& bytes) {
  const gzFile file = gzopen(path.c_str(), "wb");
  gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size()));
  gzclose_w(file);
}

inline std::string error_of_opening(const DataOptions& options) {
  return error_of([&] { open_dataset(options); });
}

/// The content of an IDX file of bytes: magic number, dimensions, values.
inline std::string idx_bytes(const std::vector<uint32_t>& shape,
                             const std::string& values) {
  std::string bytes = {0, 0, 8, static_cast<char>(shape.size())};
  for (const uint32_t extent : shape) {
    for (int shift = 24; shift >= 0; shift -= 8) {
      bytes += static_cast<char>(extent >> shift & 255);
    }
  }
  return bytes + values;
}

/// `count` images of 2×3; pixel k of image i is 10 i + k.
inline std::string images(int count) {
  std::string values;
  for (int i = 0; i < count; ++i) {
    for (int k = 0; k < 6; ++k) values += static_cast<char>(10 * i + k);
  }
  return idx_bytes({static_cast<uint32_t>(count), 2, 3}, values);
}

/// `count` labels; label i is i mod 3.
inline std::string labels(int count) {
  std::string values;
  for (int i = 0; i < count; ++i) values += static_cast<char>(i % 3);
  return idx_bytes({static_cast<uint32_t>(count)}, values);
}

}  // namespace reprise::testing
