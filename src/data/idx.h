#pragma once

#include <reprise/data/dataset.h>

#include <filesystem>
#include <string>

namespace reprise::detail {

/// An IDX file of unsigned bytes, plain or gzipped, with so many dimensions (3:
/// images, 1: labels), as a uint8 tensor of its shape. Throws c10::Error that
/// names the file, what was expected and what was found.
torch::Tensor read_idx(const std::string& path, int dimensions);

/// True where the file begins like IDX data of bytes, gzipped or not.
bool looks_like_idx(const std::string& path);

/// `path`, or `path` with or without ".gz": whichever is there; empty if none.
std::string plain_or_gzipped(const std::filesystem::path& path);

/// Images with their labels. `path` is the training images' file, from whose
/// name those of the labels and of the test images follow. `name` is "mnist",
/// "fashion-mnist", or anything else where mean and deviation are unknown.
std::shared_ptr<const Dataset> open_idx(const std::string& path,
                                        const std::string& name,
                                        const DataOptions& options);

}  // namespace reprise::detail
