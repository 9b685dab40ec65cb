#include "models/weight_files.h"

#include "base/file.h"
#include "base/json_text.h"
#include "base/text_check.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <filesystem>
#include <system_error>

namespace reprise::detail {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

/// The file of a checkpoint that is given as a directory.
std::string file_in(const std::string& path) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) return path;
  for (const char* name : {kIndexFile, kSingleFile}) {
    if (is_there(fs::path(path) / name))
      return (fs::path(path) / name).string();
  }
  TORCH_CHECK(false, "[weights] ", path, ": expected ", kSingleFile, " or ",
              kIndexFile,
              " in this directory, which has neither; name a safetensors file");
}

bool is_file_name(const std::string& text) {
  return !text.empty() && text != "." && text != ".." &&
         text.find('\0') == std::string::npos &&
         fs::path(text).filename() == text;
}

/// The files of the tensors of an index.
std::map<std::string, std::string> read_weight_map(const std::string& path) {
  const json index = parse_json(read_text(path));
  TORCH_CHECK(index.is_object() && index.contains("weight_map") &&
                  index["weight_map"].is_object() &&
                  !index["weight_map"].empty(),
              "[weights] ", path,
              ": expected a JSON object with weight_map, the files of the "
              "tensors; is it the index of a checkpoint?");
  std::map<std::string, std::string> files;
  for (const auto& [name, value] : index["weight_map"].items()) {
    const std::string shard =
        value.is_string() ? value.get<std::string>() : std::string();
    TORCH_CHECK(is_file_name(shard), "[weights] ", path,
                ": expected the name of a file next to it "
                "for tensor ",
                quoted_name(name), ", got ", shown_json(value));
    files.emplace(name, shard);
  }
  return files;
}

}  // namespace

WeightFiles::WeightFiles(const std::string& path) : path_(path) {
  const std::string file = file_in(path);
  if (fs::path(file).extension() == ".json") {
    open_index(file);
    return;
  }
  files_.emplace_back(file);
  for (const auto& [name, entry] : files_[0].entries()) file_of_[name] = 0;
}

void WeightFiles::open_index(const std::string& path) {
  std::map<std::string, size_t> opened;
  for (const auto& [name, shard] : read_weight_map(path)) {
    const auto [at, is_new] = opened.emplace(shard, files_.size());
    if (is_new) {
      const fs::path file = fs::path(path).parent_path() / shard;
      TORCH_CHECK(is_there(file), "[weights] ", path, ": expected the file ",
                  quoted_name(shard),
                  " next to it, which is missing; get all files of the "
                  "checkpoint");
      files_.emplace_back(file.string());
    }
    TORCH_CHECK(files_[at->second].entries().contains(name), "[weights] ", path,
                ": expected tensor ", quoted_name(name), " in ",
                quoted_name(shard),
                ", which does not have it; the files are of different "
                "checkpoints");
    file_of_[name] = at->second;
  }
}

std::vector<std::string> WeightFiles::names() const {
  std::vector<std::string> names;
  for (const auto& [name, file] : file_of_) names.push_back(name);
  return names;
}

const std::vector<int64_t>& WeightFiles::shape(const std::string& name) const {
  return files_[file_of_.at(name)].entries().at(name).shape;
}

torch::Tensor WeightFiles::read(const std::string& name) const {
  return files_[file_of_.at(name)].read(name);
}

namespace {

constexpr std::string_view kIndexEnd = ".safetensors.index.json";
/// Hugging Face rejects files without this entry.
const std::map<std::string, std::string> kMetadata = {{"format", "pt"}};

/// Tensors in the order given, each file with at most `most` bytes.
std::vector<NamedTensors> divided(const NamedTensors& tensors, int64_t most) {
  std::vector<NamedTensors> parts(1);
  int64_t bytes = 0;
  for (const auto& item : tensors) {
    const auto more = static_cast<int64_t>(item.second.nbytes());
    if (!parts.back().empty() && bytes + more > most) {
      parts.emplace_back();
      bytes = 0;
    }
    parts.back().push_back(item);
    bytes += more;
  }
  return parts;
}

}  // namespace

bool is_weight_index(const std::string& path) {
  return path.ends_with(kIndexEnd);
}

void write_weights(const std::string& path, const NamedTensors& tensors,
                   int64_t part_bytes) {
  if (!is_weight_index(path)) {
    write_safetensors(path, tensors, kMetadata);
    return;
  }
  const std::filesystem::path index = path;
  const std::string name = index.filename();
  const std::string base = name.substr(0, name.size() - kIndexEnd.size());
  const auto parts = divided(tensors, part_bytes);
  json weight_map = json::object();
  int64_t total = 0;
  // The index of an earlier checkpoint would name files of both.
  std::filesystem::remove(index);
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string file =
        fmt::format("{}-{:05}-of-{:05}.safetensors", base, i + 1, parts.size());
    write_safetensors(index.parent_path() / file, parts[i], kMetadata);
    for (const auto& [tensor_name, tensor] : parts[i]) {
      weight_map[tensor_name] = file;
      total += static_cast<int64_t>(tensor.nbytes());
    }
  }
  // Last: it makes the checkpoint complete.
  AtomicFile file(path);
  file.write(
      json{{"metadata", {{"total_size", total}}}, {"weight_map", weight_map}}
          .dump(2) +
      "\n");
  file.commit();
}

}  // namespace reprise::detail
