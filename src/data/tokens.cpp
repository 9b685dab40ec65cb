#include "data/tokens.h"

#include "data/dataset_error.h"
#include "data/documents.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

namespace reprise::detail {
namespace {

/// A kind of file that llm.c's dev/data/data_common.py writes, with a header of 256 int32:
/// magic number, version, number of tokens.
struct LlmcFormat {
  int32_t magic;
  int32_t version;
  int64_t token_bytes;
};
// No headerless file starts with a magic number. As uint16 tokens the first would be 55448
// and 308, but GPT-2's end at 50256; as uint32 tokens both are larger than a vocabulary.
constexpr LlmcFormat kLlmcFormats[] = {{20240520, 1, 2}, {20240801, 7, 4}};
constexpr int64_t kLlmcHeaderBytes = 256 * 4;

/// A memory-mapped file.
class Mapping {
 public:
  explicit Mapping(const std::string& path) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat info {};
    if (file < 0 || fstat(file, &info) != 0) {
      const std::string reason = std::strerror(errno);
      if (file >= 0) close(file);
      dataset_error(path, "cannot read: " + reason);
    }
    if (!S_ISREG(info.st_mode)) {
      close(file);
      dataset_error(path, "expected a plain file");
    }
    size_ = info.st_size;
    if (size_ > 0) {
      void* const at = mmap(nullptr, static_cast<size_t>(size_), PROT_READ,
                            MAP_PRIVATE, file, 0);
      const std::string reason = std::strerror(errno);
      close(file);
      if (at == MAP_FAILED) dataset_error(path, "cannot read: " + reason);
      bytes_ = static_cast<const uint8_t*>(at);
    } else {
      close(file);
    }
  }
  ~Mapping() {
    if (bytes_ != nullptr) {
      munmap(const_cast<uint8_t*>(bytes_), static_cast<size_t>(size_));
    }
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  const uint8_t* bytes() const { return bytes_; }
  int64_t size() const { return size_; }

 private:
  const uint8_t* bytes_ = nullptr;
  int64_t size_ = 0;
};

/// `length` tokens of type `Token`, starting at `begin`, in samples of `seq`. The first
/// token of a sample is the last target of the previous one.
template <typename Token>
class TokenDataset : public Dataset {
 public:
  std::shared_ptr<const Mapping> file;
  const Token* begin = nullptr;
  int64_t length = 0;
  int64_t seq = 0;
  std::string name;

  int64_t size() const override { return (length - 1) / seq; }
  int64_t count(int64_t /*index*/) const override { return seq; }

  Batch get(const std::vector<int64_t>& indices) const override {
    const auto count = static_cast<int64_t>(indices.size());
    Batch batch{.tensors = {torch::empty({count, seq}, torch::kLong),
                            torch::empty({count, seq}, torch::kLong)},
                .samples = count,
                .count = count * seq};
    int64_t* input = batch.tensors[0].template data_ptr<int64_t>();
    int64_t* target = batch.tensors[1].template data_ptr<int64_t>();
    for (const int64_t index : indices) {
      TORCH_CHECK_INDEX(index >= 0 && index < size(),
                        "[dataset] expected a sample below ", size(), ", got ",
                        index);
      const Token* const first = begin + index * seq;
      input = std::copy(first, first + seq, input);
      target = std::copy(first + 1, first + seq + 1, target);
    }
    return batch;
  }

  std::string fingerprint() const override { return sample_fingerprint(*this); }
  std::string description() const override {
    return fmt::format("{}, {} samples of {} {}", name, size(), seq,
                       sizeof(Token) == 1 ? "bytes" : "tokens");
  }
};

template <typename Token>
std::shared_ptr<const Dataset> split(std::shared_ptr<const Mapping> file,
                                     const Token* tokens, int64_t total,
                                     const DataOptions& options) {
  const std::string& path = options.name;
  const int64_t possible = int64_t{1} << (8 * sizeof(Token));
  if (options.vocab > 0 && options.vocab < possible && total > 0) {
    const Token* const most = std::max_element(tokens, tokens + total);
    if (*most >= options.vocab) {
      dataset_error(
          path, fmt::format("expected tokens below the model's vocabulary of "
                            "{}, found {} at {}; choose a larger vocabulary",
                            options.vocab, *most, most - tokens));
    }
  }
  const bool test = options.split == Split::kTest;
  const auto test_length =
      static_cast<int64_t>(static_cast<double>(total) * options.test_fraction);
  const Token* const begin = tokens + (test ? total - test_length : 0);
  const int64_t length = test ? test_length : total - test_length;
  const std::string name = std::filesystem::path(path).filename().string();
  if (options.documents != DocumentMode::kStream) {
    const auto read = [file = std::move(file), begin](
                          int64_t first, int64_t count, int64_t* out) {
      std::copy_n(begin + first, count, out);
    };
    return make_documents({name, length, read}, options);
  }
  const auto data = std::make_shared<TokenDataset<Token>>();
  data->file = std::move(file);
  data->begin = begin;
  data->length = length;
  data->seq = options.seq;
  data->name = name;
  if (data->length < options.seq + 1) {
    dataset_error(
        path, fmt::format(
                  "expected at least {} tokens for one sample of {}, found {} "
                  "in the {} part of {}; use a longer file or a smaller seq",
                  options.seq + 1, options.seq, data->length,
                  test ? "test" : "training", total));
  }
  return data;
}

/// Position and width of the tokens in a binary file.
struct TokenLayout {
  int64_t begin = 0;  // in bytes
  int64_t token_bytes = 2;
};

/// Layout by the file's header, if there is one, and otherwise by its name.
TokenLayout layout_of(const Mapping& file, const std::string& path) {
  std::array<int32_t, 3> header{};
  if (file.size() >= kLlmcHeaderBytes) {
    std::memcpy(header.data(), file.bytes(), sizeof(header));
  }
  for (const LlmcFormat& format : kLlmcFormats) {
    if (header[0] != format.magic) continue;
    if (header[1] != format.version) {
      dataset_error(
          path, fmt::format("expected version {} in llm.c's header, found {}",
                            format.version, header[1]));
    }
    const int64_t bytes = file.size() - kLlmcHeaderBytes;
    if (bytes != int64_t{header[2]} * format.token_bytes) {
      dataset_error(path,
                    fmt::format("expected {} tokens of {} bytes as stated in "
                                "the header, found {} bytes",
                                header[2], format.token_bytes, bytes));
    }
    return {kLlmcHeaderBytes, format.token_bytes};
  }
  return {0, std::filesystem::path(path).extension() == ".bin" ? 2 : 4};
}

template <typename Token>
std::shared_ptr<const Dataset> open_binary(std::shared_ptr<const Mapping> file,
                                           int64_t begin,
                                           const DataOptions& options) {
  constexpr int64_t kBytes = sizeof(Token);
  if (file->size() % kBytes != 0) {
    dataset_error(options.name,
                  fmt::format("expected tokens of {} bytes, found {} of {} "
                              "bytes",
                              kBytes, kBytes == 2 ? "an odd size" : "a size",
                              file->size()));
  }
  const auto* const tokens =
      reinterpret_cast<const Token*>(file->bytes() + begin);
  const int64_t total = (file->size() - begin) / kBytes;
  return split(std::move(file), tokens, total, options);
}

}  // namespace

bool has_token_name(const std::string& path) {
  const auto extension = std::filesystem::path(path).extension();
  return extension == ".bin" || extension == ".bin32" || extension == ".u32";
}

std::shared_ptr<const Dataset> open_tokens(const DataOptions& options) {
  TORCH_CHECK(options.seq > 0, "[dataset] expected seq above 0, got ",
              options.seq);
  TORCH_CHECK(options.test_fraction >= 0 && options.test_fraction < 1,
              "[dataset] expected a test_fraction from 0 to below 1, got ",
              options.test_fraction);
  TORCH_CHECK((options.documents == DocumentMode::kStream) ==
                  (options.document_end < 0),
              "[dataset] expected a document_end token with padded or packed "
              "documents and only then, got ",
              options.document_end, " with ", to_text(options.documents));
  auto file = std::make_shared<const Mapping>(options.name);
  if (has_token_name(options.name)) {
    const TokenLayout layout = layout_of(*file, options.name);
    return layout.token_bytes == 2
               ? open_binary<uint16_t>(std::move(file), layout.begin, options)
               : open_binary<uint32_t>(std::move(file), layout.begin, options);
  }
  const uint8_t* const bytes = file->bytes();
  const int64_t total = file->size();
  return split(std::move(file), bytes, total, options);
}

}  // namespace reprise::detail
