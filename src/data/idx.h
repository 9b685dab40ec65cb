#pragma once

#include <reprise/data/dataset.h>

#include <filesystem>
#include <string>

namespace reprise::detail {

/// Reads an IDX file of unsigned bytes, plain or gzipped, into a uint8 tensor.
/// `dimensions` is 3 for images and 1 for labels. Throws c10::Error that names the
/// file, what was expected and what was found.
torch::Tensor read_idx(const std::string& path, int dimensions);

/// Whether the file starts with the magic number of IDX bytes, gzipped or not.
bool looks_like_idx(const std::string& path);

/// Returns `path`, or `path` with ".gz" added or removed, whichever exists; empty if
/// neither does.
std::string plain_or_gzipped(const std::filesystem::path& path);

/// Opens images with their labels. `path` is the file of training images, from whose
/// name the names of the other files are derived. Mean and standard deviation of the
/// pixels are known for the names in idx.cpp, and computed for any other `name`.
std::shared_ptr<const Dataset> open_idx(const std::string& path,
                                        const std::string& name,
                                        const DataOptions& options);

}  // namespace reprise::detail
