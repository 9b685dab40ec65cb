#include "train/store/state_files.h"

#include <reprise/memory/meter.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <set>
#include <utility>

namespace reprise::detail {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kStateKey = "reprise";
constexpr const char* kPartsKey = "parts";
constexpr const char* kPiecesKey = "pieces";
constexpr const char* kSuffix = ".safetensors";

std::string base_of(const std::string& directory, const RunState& state) {
  return fmt::format("{}/state-{:010}-{:06}", directory, state.step,
                     state.micro);
}

/// Path of the part of another rank, from that of the state.
std::string part_path(std::string path, int rank) {
  path.resize(path.size() - std::string_view(kSuffix).size());
  return fmt::format("{}.part-{}{}", path, rank, kSuffix);
}

/// Path of the state that a part belongs to; empty if `path` is none.
std::string state_of_part(const std::string& path) {
  const auto at = path.rfind(".part-");
  return at == std::string::npos ? "" : path.substr(0, at) + kSuffix;
}

bool is_state_file(const fs::directory_entry& entry) {
  const std::string name = entry.path().filename();
  return name.starts_with("state-") && name.ends_with(kSuffix);
}

/// Returns the paths of the states in `directory`, oldest first.
std::vector<std::string> states_in(const std::string& directory) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (is_state_file(entry) && state_of_part(entry.path()).empty()) {
      names.push_back(entry.path());
    }
  }
  std::sort(names.begin(), names.end());  // their numbers have a fixed width
  return names;
}

/// Removes all but the last `keep` states, parts without a state, and the temporary files of
/// killed processes.
void remove_old(const std::string& directory, int keep) {
  auto states = states_in(directory);
  while (states.size() > static_cast<size_t>(keep)) {
    fs::remove(states.front());
    states.erase(states.begin());
  }
  const std::set<std::string> kept(states.begin(), states.end());
  for (const auto& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("state-")) continue;
    const std::string state = state_of_part(entry.path());
    if (!is_state_file(entry) || (!state.empty() && kept.count(state) == 0)) {
      fs::remove(entry.path());
    }
  }
}

void write_part(const std::string& path, const StatePart& part,
                std::map<std::string, std::string> metadata) {
  NamedTensors tensors = part.whole;
  json pieces = json::object();
  for (const StatePiece& piece : part.pieces) {
    tensors.emplace_back(piece.name, piece.values);
    pieces[piece.name] = {{"sizes", piece.sizes},
                          {"strides", piece.strides},
                          {"from", piece.from}};
  }
  if (!part.pieces.empty()) metadata[kPiecesKey] = pieces.dump();
  write_safetensors(path, tensors, metadata);
}

}  // namespace

void save_state_part(const std::string& directory, const RunState& state,
                     int rank, const StatePart& part) {
  write_part(part_path(base_of(directory, state) + kSuffix, rank), part, {});
}

void save_state(const RunDirectory& directory, const RunState& state, int ranks,
                const StatePart& part, int keep) {
  std::map<std::string, std::string> metadata{{kStateKey, to_text(state)}};
  if (ranks > 1) metadata[kPartsKey] = std::to_string(ranks);
  write_part(base_of(directory.path(), state) + kSuffix, part, metadata);
  remove_old(directory.path(), keep);
}

std::optional<StateFiles> StateFiles::newest(
    const RunDirectory& directory,
    const std::function<void(const std::string&)>& warn) {
  auto states = states_in(directory.path());
  for (; !states.empty(); states.pop_back()) {
    const std::string& path = states.back();
    try {
      return StateFiles(path);
    } catch (const c10::Error& error) {
      // The file may be intact: do not fall back to an older one.
      if (is_out_of_memory(error)) throw;
      warn(error.what_without_backtrace());
    } catch (const std::exception& error) {
      warn(path + ": " + error.what());
    }
  }
  return std::nullopt;
}

StateFiles::StateFiles(const std::string& path) {
  files_.emplace_back(path);
  const auto& metadata = files_.front().metadata();
  state_ = run_state_from_text(metadata.at(kStateKey));
  const auto parts = metadata.find(kPartsKey);
  const int count = parts == metadata.end() ? 1 : std::stoi(parts->second);
  for (int rank = 1; rank < count; ++rank) {
    files_.emplace_back(part_path(path, rank));
  }
  for (size_t i = 0; i < files_.size(); ++i) add_pieces(i);
  check_pieces();
}

void StateFiles::add_pieces(size_t index) {
  const SafeTensors& file = files_[index];
  const auto found = file.metadata().find(kPiecesKey);
  const json pieces = found == file.metadata().end()
                          ? json::object()
                          : json::parse(found->second);
  for (const auto& [name, entry] : file.entries()) {
    if (!pieces.contains(name)) {
      file_of_.emplace(name, index);  // equal in all files
      tensors_.emplace(name, Shape{entry.type, entry.shape});
      continue;
    }
    const json& piece = pieces.at(name);
    const auto sizes = piece.at("sizes").get<std::vector<int64_t>>();
    const auto strides = piece.at("strides").get<std::vector<int64_t>>();
    Divided& divided = divided_[name];
    const auto shape = tensors_.emplace(name, Shape{entry.type, sizes}).first;
    TORCH_CHECK(entry.shape.size() == 1 && strides.size() == sizes.size() &&
                    shape->second.sizes == sizes &&
                    shape->second.type == entry.type &&
                    (divided.ranges.empty() || divided.strides == strides),
                "[resume] ", file.path(), ": '", name,
                "' does not fit the other parts of the state");
    divided.strides = strides;
    divided.ranges.push_back({index, piece.at("from").get<int64_t>()});
  }
}

void StateFiles::check_pieces() const {
  for (const auto& [name, divided] : divided_) {
    auto ranges = divided.ranges;
    std::sort(ranges.begin(), ranges.end(),
              [](const Range& a, const Range& b) { return a.from < b.from; });
    int64_t end = 0;
    for (const Range& range : ranges) {
      TORCH_CHECK(range.from == end, "[resume] ", path(), ": values from ", end,
                  " of '", name, "' are missing");
      end += files_[range.file].entries().at(name).shape.front();
    }
    const auto& sizes = tensors_.at(name).sizes;
    const int64_t all = std::accumulate(sizes.begin(), sizes.end(), int64_t{1},
                                        std::multiplies<>());
    TORCH_CHECK(end == all, "[resume] ", path(), ": '", name, "' has ", end,
                " of ", all, " values");
  }
}

torch::Tensor StateFiles::read(const std::string& name) const {
  if (const auto whole = file_of_.find(name); whole != file_of_.end()) {
    return files_[whole->second].read(name);
  }
  const Divided& divided = divided_.at(name);
  const Shape& shape = tensors_.at(name);
  torch::Tensor tensor =
      torch::empty_strided(shape.sizes, divided.strides, shape.type);
  const torch::Tensor flat = tensor.as_strided({tensor.numel()}, {1});
  for (const Range& range : divided.ranges) {
    const torch::Tensor piece = files_[range.file].read(name);
    flat.slice(0, range.from, range.from + piece.numel()).copy_(piece);
  }
  return tensor.contiguous();
}

}  // namespace reprise::detail
