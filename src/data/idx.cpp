#include "data/idx.h"

#include "base/input_file.h"
#include "base/paths.h"
#include "base/text_check.h"
#include "data/dataset_error.h"
#include "data/named_dataset.h"

#include <reprise/base/error.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <string_view>
#include <system_error>
#include <tuple>
#include <utility>
#include <zlib.h>

namespace reprise::detail {
namespace {

namespace fs = std::filesystem;

/// Images that are found by their name. To add some, add an entry.
struct KnownImages {
  std::string_view name;  // also of the folder that has the files
  double mean;            // of the pixels, scaled to [0, 1]
  double stddev;
};
constexpr std::array kKnownImages = {
    KnownImages{"mnist", 0.1307, 0.3081},
    KnownImages{"fashion-mnist", 0.2860, 0.3530},
};

constexpr int64_t kStatisticsImages = 1000;
// The maximum compression ratio of deflate, according to zlib's technical notes.
constexpr uint64_t kMostInflation = 1100;

/// Reads plain and gzipped files through zlib, which detects the format.
class Reader {
 public:
  explicit Reader(std::string path) : path_(std::move(path)) {
    try {
      InputFile file(path_);
      file_bytes_ = file.size();
      file_ = gzdopen(file.release(), "rb");
    } catch (const Error& error) {
      dataset_error(path_, without_origin(error.what()));
    }
    if (file_ == nullptr) dataset_error(path_, "cannot read: out of memory");
    gzbuffer(file_, 1 << 18);
  }
  ~Reader() { gzclose_r(file_); }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  /// Returns the number of bytes read, which is below `count` only at the end of the
  /// file.
  uint64_t read(uint8_t* bytes, uint64_t count) {
    uint64_t done = 0;
    while (done < count) {
      const auto part = static_cast<unsigned>(
          std::min<uint64_t>(count - done, uint64_t{1} << 30));
      const int got = gzread(file_, bytes + done, part);
      int code = Z_OK;
      const char* text = gzerror(file_, &code);
      if (got < 0 || code == Z_BUF_ERROR) {
        dataset_error(
            path_, fmt::format("expected gzip data, found corruption after "
                               "{} uncompressed bytes: {}",
                               total_ + std::max(got, 0),
                               code == Z_ERRNO ? std::strerror(errno) : text));
      }
      done += static_cast<uint64_t>(got);
      total_ += static_cast<uint64_t>(got);
      if (got == 0) break;
    }
    return done;
  }

  bool gzipped() { return gzdirect(file_) == 0; }
  uint64_t file_bytes() const { return file_bytes_; }

 private:
  std::string path_;
  gzFile file_ = nullptr;
  uint64_t file_bytes_ = 0;
  uint64_t total_ = 0;
};

uint32_t big_endian(const uint8_t* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 |
         uint32_t{bytes[2]} << 8 | uint32_t{bytes[3]};
}

/// `path` with `from` in its file name replaced by `to`; empty if it has no `from`.
std::filesystem::path replaced(const std::filesystem::path& path,
                               std::string_view from, std::string_view to) {
  std::string name = path.filename().string();
  const size_t at = name.rfind(from);
  if (at == std::string::npos) return {};
  return path.parent_path() / name.replace(at, from.size(), to);
}

std::string labels_beside(const std::string& images) {
  auto labels = replaced(images, "images-idx3", "labels-idx1");
  // Some tools write a dot instead of the dash when they unpack.
  if (labels.empty()) labels = replaced(images, "images.idx3", "labels.idx1");
  if (labels.empty()) {
    dataset_error(
        images,
        "expected a file name with \"images-idx3\", from which the name of the "
        "label file is derived; rename the file");
  }
  const std::string found = plain_or_gzipped(labels);
  if (found.empty()) {
    dataset_error(images, "expected labels in " + labels.string() +
                              ", found no such file (nor with or without .gz)");
  }
  return found;
}

std::string test_images_beside(const std::string& images) {
  const auto test = replaced(images, "train-images", "t10k-images");
  if (test.empty()) {
    dataset_error(images,
                  "expected a file name with \"train-images\", from which the "
                  "name of the "
                  "test images is derived; rename the file");
  }
  const std::string found = plain_or_gzipped(test);
  if (found.empty()) {
    dataset_error(images, "expected test images in " + test.string() +
                              ", found no such file (nor with or without .gz)");
  }
  return found;
}

/// Mean and standard deviation of up to 1000 images. They are spread over the file,
/// because it may be sorted by class.
std::pair<double, double> statistics(const torch::Tensor& images) {
  const int64_t count = images.size(0), bytes = images.stride(0);
  const int64_t used = std::min(count, kStatisticsImages);
  const uint8_t* const pixels = images.data_ptr<uint8_t>();
  std::array<int64_t, 256> histogram{};
  for (int64_t i = 0; i < used; ++i) {
    const uint8_t* image = pixels + i * count / used * bytes;
    for (int64_t k = 0; k < bytes; ++k) ++histogram[image[k]];
  }
  const auto total = static_cast<double>(used * bytes);
  double mean = 0, square = 0;
  for (int value = 0; value < 256; ++value) {
    const double share = static_cast<double>(histogram[value]) / total;
    mean += share * value / 255;
    square += share * value / 255 * value / 255;
  }
  const double stddev = std::sqrt(std::max(0.0, square - mean * mean));
  // Constant images are not scaled.
  return {mean, stddev > 1e-6 ? stddev : 1};
}

class IdxDataset : public Dataset {
 public:
  torch::Tensor images;  // (N, h, w) uint8
  std::vector<int64_t> labels;
  int64_t channels = 1;
  double mean_ = 0, stddev_ = 1;
  std::string name;

  int64_t size() const override { return images.size(0); }
  double mean() const override { return mean_; }
  double stddev() const override { return stddev_; }

  // Copied without index_select, which would start LibTorch's threads in every worker
  // of the loader.
  Batch get(const std::vector<int64_t>& indices) const override {
    const auto count = static_cast<int64_t>(indices.size());
    const int64_t height = images.size(1), width = images.size(2);
    const auto bytes = static_cast<size_t>(height * width);
    Batch batch{.tensors = {torch::empty({count, channels, height, width},
                                         torch::kUInt8),
                            torch::empty({count}, torch::kLong)},
                .samples = count,
                .count = count};
    const uint8_t* const from = images.data_ptr<uint8_t>();
    uint8_t* to = batch.tensors[0].data_ptr<uint8_t>();
    int64_t* target = batch.tensors[1].data_ptr<int64_t>();
    for (const int64_t index : indices) {
      TORCH_CHECK_INDEX(index >= 0 && index < size(),
                        "[dataset] expected a sample below ", size(), ", got ",
                        index);
      for (int64_t c = 0; c < channels; ++c, to += bytes) {
        std::memcpy(to, from + static_cast<size_t>(index) * bytes, bytes);
      }
      *target++ = labels[static_cast<size_t>(index)];
    }
    return batch;
  }

  std::vector<torch::Tensor> tensors() const override { return {images}; }

  std::string fingerprint() const override { return sample_fingerprint(*this); }
  std::string description() const override {
    const int64_t classes = *std::max_element(labels.begin(), labels.end()) + 1;
    return fmt::format("{}, {} images of {}×{}×{}, {} classes", name, size(),
                       channels, images.size(1), images.size(2), classes);
  }
};

/// The folders to search for known images, in order. scripts/data.sh downloads to the
/// first one.
std::vector<fs::path> folders_of(const std::string& name) {
  std::vector<fs::path> folders;
  const std::string own = environment_variable("REPRISE_DATA");
  const std::string cache = cache_directory();
  if (!own.empty()) folders.push_back(fs::path(own) / name);
  if (!cache.empty()) folders.push_back(fs::path(cache) / name);
  folders.push_back(fs::path("/usr/share/datasets") / name);  // Debian's
  return folders;
}

std::string find_training_images(const std::string& name) {
  std::string searched;
  for (const fs::path& folder : folders_of(name)) {
    const std::string found =
        plain_or_gzipped(folder / "train-images-idx3-ubyte");
    if (!found.empty()) return found;
    searched += (searched.empty() ? "" : ", ") + folder.string();
  }
  TORCH_CHECK(false, "[dataset] ", name, " was not found (searched in ",
              searched, "); download it with: scripts/data.sh ", name);
}

std::shared_ptr<const Dataset> open_known_images(const DataOptions& options) {
  TORCH_CHECK(!options.tokens, "[dataset] expected tokens for this model, ",
              options.name,
              " has images; choose random or a file of text or tokens");
  return open_idx(find_training_images(options.name), options.name, options);
}

}  // namespace

torch::Tensor read_idx(const std::string& path, int dimensions) {
  Reader reader(path);
  const char* const kind = dimensions == 3 ? "images" : "labels";
  const uint64_t header_bytes = 4 + 4 * static_cast<uint64_t>(dimensions);
  std::array<uint8_t, 64> header{};
  const uint64_t got = reader.read(header.data(), header_bytes);
  const uint32_t expected_magic = 0x800u + static_cast<uint32_t>(dimensions);
  if (got >= 4 && big_endian(header.data()) != expected_magic) {
    dataset_error(
        path,
        fmt::format("expected IDX {} (magic number {:#010x}), found {:#010x}",
                    kind, expected_magic, big_endian(header.data())));
  }
  if (got < header_bytes) {
    dataset_error(path, fmt::format("expected a header of {} bytes, found {}",
                                    header_bytes, got));
  }

  std::vector<int64_t> shape;
  uint64_t bytes = 1;
  for (int i = 0; i < dimensions; ++i) {
    const uint64_t extent = big_endian(&header[4 + 4 * static_cast<size_t>(i)]);
    if (extent == 0) {
      dataset_error(path, fmt::format("expected {}, found dimension {} to be 0",
                                      kind, i + 1));
    }
    if (bytes > uint64_t{std::numeric_limits<int64_t>::max()} / extent) {
      dataset_error(
          path,
          "expected dimensions that fit in memory, found more than 2^63 "
          "bytes");
    }
    bytes *= extent;
    shape.push_back(static_cast<int64_t>(extent));
  }
  // Checked before allocating, since the header may be corrupt.
  const bool gzipped = reader.gzipped();
  const uint64_t possible =
      gzipped
          ? reader.file_bytes() * kMostInflation
          : reader.file_bytes() - std::min(header_bytes, reader.file_bytes());
  if (bytes > possible) {
    dataset_error(
        path,
        fmt::format("expected {} bytes of {} after the header, found {}{}",
                    bytes, kind, gzipped ? "at most " : "", possible));
  }
  const torch::Tensor values = torch::empty(shape, torch::kUInt8);
  const uint64_t found = reader.read(values.data_ptr<uint8_t>(), bytes);
  if (found != bytes) {
    dataset_error(
        path, fmt::format("expected {} bytes of {} after the header, found {}",
                          bytes, kind, found));
  }
  uint8_t more = 0;
  if (reader.read(&more, 1) != 0) {
    dataset_error(path,
                  fmt::format("expected {} bytes of {} after the header, found "
                              "more",
                              bytes, kind));
  }
  return values;
}

bool looks_like_idx(const std::string& path) {
  if (!why_not_regular(path).empty()) return false;
  const gzFile file = gzopen(path.c_str(), "rb");
  if (file == nullptr) return false;
  std::array<uint8_t, 4> magic{};
  const int got = gzread(file, magic.data(), 4);
  gzclose_r(file);
  return got == 4 && magic[0] == 0 && magic[1] == 0 && magic[2] == 8;
}

std::string plain_or_gzipped(const std::filesystem::path& path) {
  std::error_code ignored;
  if (std::filesystem::exists(path, ignored)) return path.string();
  std::filesystem::path other = path;
  if (path.extension() == ".gz") {
    other.replace_extension();
  } else {
    other += ".gz";
  }
  return std::filesystem::exists(other, ignored) ? other.string() : "";
}

std::shared_ptr<const Dataset> open_idx(const std::string& path,
                                        const std::string& name,
                                        const DataOptions& options) {
  TORCH_CHECK(options.channels > 0, "[dataset] expected channels above 0, got ",
              options.channels);
  const bool test = options.split == Split::kTest;
  const std::string images_path = test ? test_images_beside(path) : path;
  const auto data = std::make_shared<IdxDataset>();
  data->name = name;
  data->channels = options.channels;
  data->images = read_idx(images_path, 3);
  const std::string labels_path = labels_beside(images_path);
  const torch::Tensor labels = read_idx(labels_path, 1);
  if (labels.size(0) != data->size()) {
    dataset_error(
        labels_path,
        fmt::format("expected {} labels, one per image of {}, found {}",
                    data->size(), images_path, labels.size(0)));
  }
  const uint8_t* const label = labels.data_ptr<uint8_t>();
  data->labels.assign(label, label + labels.size(0));
  for (size_t i = 0; options.classes > 0 && i < data->labels.size(); ++i) {
    if (data->labels[i] >= options.classes) {
      dataset_error(
          labels_path,
          fmt::format("expected labels below the model's {} classes, found {} "
                      "at image {}; choose a model with more classes",
                      options.classes, data->labels[i], i));
    }
  }
  const auto known = std::find_if(
      kKnownImages.begin(), kKnownImages.end(),
      [&name](const KnownImages& images) { return images.name == name; });
  if (known != kKnownImages.end()) {
    data->mean_ = known->mean, data->stddev_ = known->stddev;
  } else {
    // Test images are normalized like the training images.
    std::tie(data->mean_, data->stddev_) =
        statistics(test ? read_idx(path, 3) : data->images);
  }
  return data;
}

std::vector<NamedDataset> idx_datasets() {
  std::vector<NamedDataset> list;
  for (const KnownImages& images : kKnownImages) {
    list.push_back({std::string(images.name), open_known_images});
  }
  return list;
}

}  // namespace reprise::detail
