// ListOptimizer: state in host memory.
// Tested by tests/train/optim/host_state_test.cpp.
//
// The state of a parameter is one block of host memory, with its kinds one after another. An
// update passes it through device memory in chunks. If the update of a value depends on no
// other value, a chunk may have a part of a parameter, so that chunks stay small.
#include "train/optim/list_optimizer.h"
#include "train/optim/state_ring.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <map>
#include <utility>

namespace reprise {
namespace {

constexpr int64_t kAlign = 512;  // bytes; also a bound for parts of a parameter

int64_t aligned(int64_t bytes) {
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

/// The values of a dense tensor in the order of memory.
torch::Tensor flat(const torch::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1});
}

char* address_of(const torch::Tensor& tensor) {
  return static_cast<char*>(tensor.data_ptr());
}

}  // namespace

/// Values [begin, begin + count) of a parameter, or all of them.
struct ListOptimizer::HostPiece {
  Entry* entry = nullptr;
  bool whole = true;
  int64_t begin = 0, count = 0;
  int64_t place = 0;  // in the chunk's buffer
};

struct ListOptimizer::HostChunk {
  std::vector<HostPiece> pieces;
  int64_t bytes = 0;
  torch::ScalarType type = torch::kFloat;  // of all parameters
};

bool ListOptimizer::elementwise() const {
  return false;
}

int64_t ListOptimizer::block_bytes(const Entry& entry) const {
  int64_t bytes = 0;
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    bytes += aligned(state_bytes(kind, entry.parameter));
  }
  return bytes;
}

int64_t ListOptimizer::state_bytes(size_t kind,
                                   const torch::Tensor& parameter) const {
  const auto shape = shape_of(kind, parameter);
  if (!shape) return 0;
  return c10::multiply_integers(*shape) *
         static_cast<int64_t>(c10::elementSize(type_of(kind, parameter)));
}

torch::Tensor ListOptimizer::state_in(const torch::Tensor& bytes, size_t kind,
                                      const torch::Tensor& parameter) const {
  const auto shape = shape_of(kind, parameter);
  const auto type = type_of(kind, parameter);
  const torch::Tensor values =
      bytes.narrow(0, 0, state_bytes(kind, parameter)).view(type);
  const bool like = parameter.sizes() == *shape &&
                    parameter.scalar_type() == type &&
                    parameter.is_non_overlapping_and_dense();
  return like ? values.as_strided(parameter.sizes(), parameter.strides())
              : values.view(*shape);
}

bool ListOptimizer::move_state(std::shared_ptr<detail::HostTensors> host,
                               double share) {
  const torch::NoGradGuard no_grad;
  if ((host_ == nullptr) == (host == nullptr)) return true;
  if (!host) {
    move_to_device();
    return true;
  }
  // A part is spread over all parameters, so that updates of a stage have some of both.
  int64_t total = 0, seen = 0;
  std::vector<Entry*> moved;
  for (Entry& entry : entries_) {
    const int64_t bytes = block_bytes(entry);
    if (!entry.parameter.requires_grad() || bytes == 0) continue;
    seen += bytes;
    const double wanted = share * static_cast<double>(seen);
    if (static_cast<double>(total) + static_cast<double>(bytes) / 2 > wanted) {
      continue;
    }
    moved.push_back(&entry);
    total += bytes;
  }
  if (total == 0) return true;
  const torch::Tensor all = host->allocate(total);
  if (!all.defined()) return false;
  int64_t place = 0;
  for (Entry* entry : moved) {
    entry->block = all.narrow(0, place, block_bytes(*entry));
    place += block_bytes(*entry);
    int64_t inside = 0;
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      const int64_t bytes = state_bytes(kind, entry->parameter);
      if (bytes == 0) continue;
      auto values = state_in(entry->block.narrow(0, inside, bytes), kind,
                             entry->parameter);
      inside += aligned(bytes);
      torch::Tensor& own = entry->state[kind];
      if (own.defined()) values.copy_(own);
      own = values;
    }
  }
  host_ = std::move(host);
  return true;
}

void ListOptimizer::move_to_device() {
  host_->synchronize();
  std::vector<Tensors> states(entries_.size());
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    states[i] = entry.state;
    if (!entry.block.defined()) continue;
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      torch::Tensor& state = states[i][kind];
      if (!state.defined()) continue;
      // Before the first update there is none on the device.
      state = entry.count > 0 ? make_tensor(kind, entry.parameter).copy_(state)
                              : torch::Tensor();
    }
  }
  for (size_t i = 0; i < entries_.size(); ++i) {
    entries_[i].state = std::move(states[i]);
    entries_[i].block.reset();
  }
  host_.reset();
}

int64_t ListOptimizer::host_state_bytes() const {
  int64_t bytes = 0;
  for (const Entry& entry : entries_) {
    if (entry.block.defined()) bytes += entry.block.numel();
  }
  return bytes;
}

std::vector<ListOptimizer::HostChunk> ListOptimizer::host_chunks_of(
    const std::vector<Entry*>& entries) const {
  const int64_t most = host_->chunk_bytes();
  std::vector<HostChunk> chunks;
  const auto add = [&](HostPiece piece, int64_t bytes) {
    const auto type = piece.entry->parameter.scalar_type();
    if (chunks.empty() || chunks.back().bytes + bytes > most ||
        chunks.back().type != type) {
      chunks.push_back({{}, 0, type});
    }
    HostChunk& chunk = chunks.back();
    piece.place = chunk.bytes;
    chunk.bytes += bytes;
    chunk.pieces.push_back(piece);
  };
  for (Entry* entry : entries) {
    const torch::Tensor& p = entry->parameter;
    const int64_t bytes = block_bytes(*entry);
    const bool divisible = bytes > most && elementwise() &&
                           p.is_non_overlapping_and_dense() &&
                           p.grad().strides() == p.strides();
    if (!divisible) {
      add({entry, /*whole=*/true, 0, p.numel()}, bytes);
      continue;
    }
    const auto item = static_cast<int64_t>(p.element_size());
    const auto kinds = static_cast<int64_t>(kinds_.size());
    const int64_t step =
        std::max<int64_t>(1, most / kinds / kAlign) * kAlign / item;
    for (int64_t begin = 0; begin < p.numel(); begin += step) {
      const int64_t count = std::min(step, p.numel() - begin);
      add({entry, /*whole=*/false, begin, count},
          kinds * aligned(count * item));
    }
  }
  return chunks;
}

ListOptimizer::List ListOptimizer::list_of(const HostChunk& chunk,
                                           const torch::Tensor& buffer) const {
  List list;
  list.state.resize(kinds_.size());
  for (const HostPiece& piece : chunk.pieces) {
    const Entry& entry = *piece.entry;
    const torch::Tensor& p = entry.parameter;
    const auto part = [&](const torch::Tensor& tensor) {
      return piece.whole ? tensor
                         : flat(tensor).narrow(0, piece.begin, piece.count);
    };
    list.parameters.push_back(part(p));
    list.gradients.push_back(part(p.grad()));
    list.counts.push_back(entry.count + 1);
    int64_t place = piece.place;
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      if (!entry.state[kind].defined()) {
        list.state[kind].emplace_back();
        continue;
      }
      const int64_t bytes =
          piece.whole ? state_bytes(kind, p) : piece.count * p.element_size();
      const torch::Tensor values = buffer.narrow(0, place, bytes);
      list.state[kind].push_back(piece.whole ? state_in(values, kind, p)
                                             : values.view(p.scalar_type()));
      place += aligned(bytes);
    }
  }
  return list;
}

std::vector<detail::StateRing::Part> ListOptimizer::parts_of(
    const HostChunk& chunk, const torch::Tensor& buffer) const {
  std::vector<detail::StateRing::Part> parts;
  for (const HostPiece& piece : chunk.pieces) {
    const Entry& entry = *piece.entry;
    char* to = address_of(buffer) + piece.place;
    if (piece.whole) {
      parts.push_back({address_of(entry.block), to,
                       static_cast<size_t>(entry.block.numel())});
      continue;
    }
    const auto item = static_cast<int64_t>(entry.parameter.element_size());
    for (const torch::Tensor& state : entry.state) {
      parts.push_back({address_of(state) + piece.begin * item, to,
                       static_cast<size_t>(piece.count * item)});
      to += aligned(piece.count * item);
    }
  }
  return parts;
}

void ListOptimizer::apply_on_host(const std::vector<Entry*>& entries, double lr,
                                  const std::function<void()>& before) {
  const torch::Device device = entries[0]->parameter.device();
  const std::vector<HostChunk> chunks = host_chunks_of(entries);
  int64_t most = 0;
  for (const HostChunk& chunk : chunks) most = std::max(most, chunk.bytes);
  detail::StateRing ring(*host_, device, most, chunks.size());
  const bool fused = can_fuse(entries);
  std::vector<List> lists;
  std::vector<std::vector<detail::StateRing::Part>> parts;
  for (size_t i = 0; i < chunks.size(); ++i) {
    lists.push_back(list_of(chunks[i], ring.buffer(i)));
    parts.push_back(parts_of(chunks[i], ring.buffer(i)));
  }
  prepare(lists, fused);
  if (!fused && temporaries() == Temporaries::kWorkspace) {
    // One workspace per type, large enough for all chunks.
    std::map<torch::ScalarType, Tensors> workspaces;
    for (const List& all : lists_by_type(entries)) {
      workspaces[all.parameters[0].scalar_type()] = make_workspace(all);
    }
    for (size_t i = 0; i < chunks.size(); ++i) {
      lists[i].workspace = workspaces.at(chunks[i].type);
    }
  }
  before();
  ring.pass(parts, [&](size_t i) { update_all({lists[i]}, fused, lr); });
}

}  // namespace reprise
