#pragma once

#include <reprise/base/enum_text.h>
#include <reprise/memory/kept.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

namespace reprise {

/// What live memory is used for. `kWorkspace` is everything that was not
/// claimed: temporaries of operators, gradients of activations, and unknown
/// tensors.
enum class Category {
  kParameters,
  kGradients,
  kOptimizer,
  kActivations,
  kData,
  kWorkspace,
};
constexpr size_t kCategoryCount = 6;

/// Names as printed and as used for JSON keys.
template <>
struct EnumText<Category> {
  static constexpr std::array<std::string_view, kCategoryCount> names{
      "parameters",  "gradients", "optimizer",
      "activations", "data",      "workspace"};
};

/// Live bytes per category at one point in time. They add up to `total_bytes`,
/// unless claimed tensors were allocated before counting began.
struct MemoryBreakdown {
  int64_t total_bytes = 0;
  std::array<int64_t, kCategoryCount> bytes{};
  std::vector<int64_t> activations_by_stage;  ///< saved activations per stage

  int64_t operator[](Category category) const {
    return bytes.at(static_cast<size_t>(category));
  }
};

/// Attributes the live bytes of one device to categories. Tensors are claimed
/// through functions that are called at each measurement, because gradients and
/// optimizer state are allocated and freed during training. A storage that is
/// claimed twice counts for the first claim. Tensors on other devices are
/// ignored. Not thread-safe.
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

  /// Attributes the tensors that `source` returns to `category`. Throws
  /// c10::Error if `category` is kWorkspace.
  void claim(Category category, Source source);

  /// Claims parameters and buffers as kParameters and the parameters' `.grad`
  /// as kGradients. The ledger holds references to all of them.
  void claim_model(std::vector<at::Tensor> parameters,
                   std::vector<at::Tensor> buffers = {});

  /// Claims as kActivations the storages that `meter` counts and that no other
  /// claim covers. `meter` is not owned and must outlive the ledger.
  void claim_kept(const KeptMeter& meter);

  /// Returns the live bytes per category at the time of the call.
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

/// Returns the bytes of the distinct storages of `tensors`. Undefined tensors
/// count as 0.
int64_t storage_bytes(at::TensorList tensors);

}  // namespace reprise
