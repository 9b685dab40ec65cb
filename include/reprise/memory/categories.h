#pragma once

#include <reprise/memory/kept.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

namespace reprise {

/// What a live byte is for. `kWorkspace` is the rest: operators' temporaries,
/// gradients in flight, and whatever nobody has claimed.
enum class Category {
  kParameters,
  kGradients,
  kOptimizer,
  kActivations,
  kData,
  kWorkspace,
};
constexpr size_t kCategoryCount = 6;

/// "parameters", "gradients", …: as printed and as JSON keys.
std::string_view name_of(Category category);

/// Live bytes by category at one moment. They add up to `total_bytes`, unless
/// tensors were claimed that the allocator never counted.
struct MemoryBreakdown {
  int64_t total_bytes = 0;
  std::array<int64_t, kCategoryCount> bytes{};
  std::vector<int64_t> activations_by_stage;

  int64_t operator[](Category category) const {
    return bytes.at(static_cast<size_t>(category));
  }
};

/// Divides the live bytes of one device among categories. Tensors are claimed
/// through functions, asked at each measurement, since gradients and optimizer
/// state come and go. A storage claimed twice counts for the first claim; only
/// tensors on the ledger's device count.
///
///     MemoryLedger ledger(torch::kCPU);
///     ledger.claim_model(model->parameters(), model->buffers());
///     ledger.claim(Category::kOptimizer,
///                  [&] { return optimizer_state(); });
///     MemoryBreakdown now = ledger.measure();
class MemoryLedger {
 public:
  using Source = std::function<std::vector<at::Tensor>()>;

  explicit MemoryLedger(c10::Device device);

  void claim(Category category, Source source);

  /// Parameters and buffers as kParameters, their `.grad` as kGradients.
  /// `parameters` and `buffers` are held for as long as the ledger lives.
  void claim_model(std::vector<at::Tensor> parameters,
                   std::vector<at::Tensor> buffers = {});

  /// Takes kActivations from what `meter` counts and nobody else has claimed;
  /// the meter must outlive the ledger.
  void claim_kept(const KeptMeter& meter);

  MemoryBreakdown measure() const;

 private:
  struct Claim {
    Category category;
    Source source;
  };
  c10::Device device_;
  std::vector<Claim> claims_;
  const KeptMeter* kept_ = nullptr;
};

/// Bytes of the distinct storages behind `tensors`; undefined ones count 0.
int64_t storage_bytes(at::TensorList tensors);

}  // namespace reprise
