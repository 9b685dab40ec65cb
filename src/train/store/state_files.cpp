#include "train/store/state_files.h"

#include "base/json_text.h"
#include "base/text_check.h"
#include "base/throw_error.h"
#include "train/store/state_names.h"

#include <reprise/base/error.h>
#include <reprise/memory/meter.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <fcntl.h>
#include <filesystem>
#include <limits>
#include <new>
#include <numeric>
#include <unistd.h>
#include <utility>

namespace reprise::detail {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kStateKey = "reprise";
constexpr const char* kPartsKey = "parts";
constexpr const char* kPiecesKey = "pieces";
constexpr const char* kSaveKey = "save";
/// Format of states that have checksums.
constexpr int kFormatWithChecksums = 2;

/// Removes old states; see save_state().
void remove_old(const std::string& directory, const std::string& written,
                int keep, const StateWarn& warn) {
  auto states = states_in(directory);
  while (!states.empty() && states.back() != written) states.pop_back();
  if (states.empty()) return;  // not a file of this directory any more
  states.pop_back();
  int kept = 1;
  for (; !states.empty(); states.pop_back()) {
    const std::string& state = states.back();
    if (kept >= keep) {
      remove_state(state);
      continue;
    }
    const std::string why = why_broken(state, /*whole=*/false);
    if (why.empty()) {
      ++kept;
    } else {
      warn(fmt::format("{}; set aside as {}", why, set_aside(state)));
    }
  }
  for (const std::string& path : remains_in(directory)) {
    fs::remove(path);
  }
}

void write_part(const std::string& path, const StatePart& part,
                std::map<std::string, std::string> metadata) {
  if (!part.save.empty()) metadata[kSaveKey] = part.save;
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

int part_count(const std::string& text) {
  constexpr int kMostParts = 1 << 16;
  int count = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, count);
  if (error != std::errc{} || rest != end || count < 1 || count > kMostParts) {
    throw Error("expected a number of parts, got " + in_quotes(text));
  }
  return count;
}

/// Whether a tensor of these sizes and strides fills its memory without gaps.
bool is_dense(const std::vector<int64_t>& sizes,
              const std::vector<int64_t>& strides) {
  if (sizes.size() != strides.size()) return false;
  std::vector<std::pair<int64_t, int64_t>> dimensions;  // stride, size
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] < 0 || strides[i] < 0) return false;
    if (sizes[i] != 1) dimensions.emplace_back(strides[i], sizes[i]);
  }
  if (std::count(sizes.begin(), sizes.end(), 0) > 0) return true;
  std::sort(dimensions.begin(), dimensions.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dimensions) {
    if (stride != expected ||
        expected > std::numeric_limits<int64_t>::max() / size) {
      return false;
    }
    expected *= size;
  }
  return true;
}

}  // namespace

void save_state_part(const std::string& directory, const RunState& state,
                     int rank, const StatePart& part) {
  const std::string path = state_path(directory, state.step, state.micro);
  write_part(part_path(path, rank), part, {});
}

void save_state(const RunDirectory& directory, const RunState& state, int ranks,
                const StatePart& part, int keep, const StateWarn& warn) {
  std::map<std::string, std::string> metadata{{kStateKey, to_text(state)}};
  if (ranks > 1) metadata[kPartsKey] = std::to_string(ranks);
  const std::string path =
      state_path(directory.path(), state.step, state.micro);
  write_part(path, part, metadata);
  try {
    remove_old(directory.path(), path, keep, warn);
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    // The state is saved.
    warn(fmt::format("old states were not removed: {}", error.what()));
  }
}

namespace {

/// Throws if the system refuses to open a file that is there.
void check_readable(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0 && errno != ENOENT) {
    throw_error("[run] cannot read {}: {}; the state may be whole", path,
                system_reason());
  }
  if (file >= 0) close(file);
}

}  // namespace

std::string why_broken(const std::string& path, bool whole) {
  check_readable(path);
  for (const std::string& part : parts_of(path)) check_readable(part);
  try {
    const StateFiles files(path);
    if (whole) files.verify();
    return "";
  } catch (const c10::Error& error) {
    if (is_out_of_memory(error)) throw;
    return error.what_without_backtrace();
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    return fmt::format("[resume] {}: {}", path, shortened(error.what()));
  }
}

std::optional<StateFiles> StateFiles::newest(const RunDirectory& directory,
                                             const StateWarn& warn) {
  auto states = states_in(directory.path());
  std::string first;  // reason
  for (; !states.empty(); states.pop_back()) {
    const std::string& path = states.back();
    std::string why = why_broken(path, /*whole=*/true);
    if (!why.empty()) why = why_broken(path, /*whole=*/true);  // once more
    if (why.empty()) return StateFiles(path);
    const std::string name = fs::path(set_aside(path)).filename().string();
    warn(fmt::format("not whole, set aside as {}: {}", name, why));
    if (first.empty()) first = why;
  }
  const auto broken = set_aside_in(directory.path());
  if (broken.empty()) return std::nullopt;
  throw_error(
      "[resume] {} holds no whole state, only {} files that were set aside "
      "(*.broken){}{}; restore a state from a copy, or begin another run with "
      "--out",
      directory.path(), broken.size(), first.empty() ? "" : ": ", first);
}

StateFiles::StateFiles(const std::string& path) {
  files_.emplace_back(path);
  const auto& metadata = files_.front().metadata();
  const auto text = metadata.find(kStateKey);
  TORCH_CHECK(text != metadata.end(), "[resume] ", path,
              ": expected the state of a run, got other tensors");
  state_ = run_state_from_text(text->second);
  const auto parts = metadata.find(kPartsKey);
  const int count = parts == metadata.end() ? 1 : part_count(parts->second);
  for (int rank = 1; rank < count; ++rank) {
    const std::string part = part_path(path, rank);
    TORCH_CHECK(fs::exists(part), "[resume] ", path, ": its part ", part,
                " is missing");
    files_.emplace_back(part);
  }
  check_files();
  for (size_t i = 0; i < files_.size(); ++i) add_pieces(i);
  check_pieces();
}

void StateFiles::check_files() const {
  const auto save_of = [](const SafeTensors& file) {
    const auto found = file.metadata().find(kSaveKey);
    return found == file.metadata().end() ? "" : found->second;
  };
  for (const SafeTensors& file : files_) {
    TORCH_CHECK(state_.format < kFormatWithChecksums || file.has_checksums(),
                "[resume] ", file.path(),
                ": expected checksums, which the file does not have");
    TORCH_CHECK(save_of(file) == save_of(files_.front()), "[resume] ",
                file.path(), ": it belongs to another state than ", path());
  }
}

void StateFiles::verify() const {
  for (const SafeTensors& file : files_) file.verify();
}

void StateFiles::add_pieces(size_t index) {
  const SafeTensors& file = files_[index];
  const auto found = file.metadata().find(kPiecesKey);
  const json pieces = found == file.metadata().end()
                          ? json::object()
                          : parse_json(found->second);
  TORCH_CHECK(pieces.is_object(), "[resume] ", file.path(),
              ": expected the ranges of divided tensors as a JSON object");
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
    TORCH_CHECK(entry.shape.size() == 1 && is_dense(sizes, strides) &&
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
