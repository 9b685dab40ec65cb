#include "compat/lt_gemm.h"

#include "compat/cuda.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace reprise::compat {
namespace {

constexpr int kCandidates = 8;
constexpr int64_t kMinMultiplications = int64_t{1} << 28;
constexpr size_t kMaxWorkspaceBytes = size_t{32} << 20;
/// An algorithm may need this much workspace even if cublasLt's own choice needs less.
constexpr size_t kFreeWorkspaceBytes = size_t{4} << 20;
/// Larger sums are not copied for trials.
constexpr size_t kMaxScratchBytes = size_t{256} << 20;
/// Algorithms that are faster by less than this are as good as cublasLt's choice.
constexpr double kNoise = 0.015;
constexpr double kTrialMs = 0.4;  // duration of a row of runs

/// A matrix as cublasLt sees it: column-major.
struct LtMatrix {
  int64_t rows = 0, columns = 0, leading = 0;
  bool transposed = false;  ///< is the transpose of the operand
  auto operator<=>(const LtMatrix&) const = default;
};

/// Everything that an algorithm depends on.
struct Key {
  int device = 0;
  at::ScalarType operand_type{}, out_type{};
  LtMatrix a, b, out;
  int64_t addend_leading = 0;  ///< 0: no addend
  bool in_place = false, bias = false;
  std::array<uint32_t, 4> alignments{};  ///< of a, b, addend and out
  auto operator<=>(const Key&) const = default;
};

cudaDataType_t cuda_type(at::ScalarType type) {
  return type == at::kFloat      ? CUDA_R_32F
         : type == at::kBFloat16 ? CUDA_R_16BF
                                 : CUDA_R_16F;
}

uint32_t alignment_of(const at::Tensor& tensor) {
  constexpr uint32_t kEnough = 256;
  if (!tensor.defined()) return kEnough;
  const auto address = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  return static_cast<uint32_t>(
      std::min<uintptr_t>(address & (~address + 1), kEnough));
}

/// A row-major matrix is a transposed one for cublasLt, and the other way round; nothing if
/// it is contiguous in neither direction. Products are computed transposed, so that
/// a row-major operand counts as not transposed.
std::optional<LtMatrix> matrix_of(const at::Tensor& tensor) {
  if (tensor.stride(1) == 1 && tensor.stride(0) >= tensor.size(1)) {
    return LtMatrix{tensor.size(1), tensor.size(0), tensor.stride(0), false};
  }
  if (tensor.stride(0) == 1 && tensor.stride(1) >= tensor.size(0)) {
    return LtMatrix{tensor.size(0), tensor.size(1), tensor.stride(1), true};
  }
  return std::nullopt;
}

bool is_half(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBFloat16 ||
         tensor.scalar_type() == at::kHalf;
}

std::optional<Key> key_of(const LtProduct& product) {
  const at::Tensor &a = product.a, &b = product.b, &out = product.out;
  const at::Tensor &bias = product.bias, &addend = product.addend;
  if (!a.is_cuda() || !is_half(a) || b.scalar_type() != a.scalar_type() ||
      (out.scalar_type() != at::kFloat &&
       out.scalar_type() != a.scalar_type()) ||
      a.size(0) * a.size(1) * b.size(1) < kMinMultiplications) {
    return std::nullopt;
  }
  const auto a_matrix = matrix_of(a), b_matrix = matrix_of(b),
             out_matrix = matrix_of(out);
  if (!a_matrix || !b_matrix || !out_matrix || out_matrix->transposed) {
    return std::nullopt;
  }
  Key key;
  key.device = a.device().index();
  key.operand_type = a.scalar_type();
  key.out_type = out.scalar_type();
  key.a = *a_matrix;
  key.b = *b_matrix;
  key.out = *out_matrix;
  key.alignments = {alignment_of(a), alignment_of(b), alignment_of(addend),
                    alignment_of(out)};
  if (*std::min_element(key.alignments.begin(), key.alignments.end()) < 16) {
    return std::nullopt;
  }
  if (bias.defined()) {
    if (bias.scalar_type() != key.out_type || !bias.is_contiguous()) {
      return std::nullopt;
    }
    key.bias = true;
  }
  if (addend.defined()) {
    const auto addend_matrix = matrix_of(addend);
    if (addend.scalar_type() != key.out_type || !addend_matrix ||
        addend_matrix->transposed) {
      return std::nullopt;
    }
    key.addend_leading = addend_matrix->leading;
    key.in_place = addend.data_ptr() == out.data_ptr();
  }
  return key;
}

/// Addresses of one product.
struct Operands {
  const void *a, *b, *addend, *bias;
  void* out;
};

/// Device memory outside of LibTorch's statistics, for trials that take a few milliseconds.
class Scratch {
 public:
  explicit Scratch(size_t bytes) {
    if (bytes > 0 && cudaMalloc(&address_, bytes) != cudaSuccess) {
      cudaGetLastError();  // not an error of later calls
      failed_ = true;
    }
  }
  ~Scratch() { cudaFree(address_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  bool failed() const { return failed_; }
  void* address() const { return address_; }

 private:
  void* address_ = nullptr;
  bool failed_ = false;
};

/// The products of one key. Lives as long as the process.
class TunedProduct {
 public:
  TunedProduct(cublasLtHandle_t handle, const Key& key);

  /// Chooses the fastest algorithm. Leaves the output undefined, unless it is
  /// also the addend.
  void tune(const Operands& operands, cudaStream_t stream);
  /// Returns false if there is no algorithm.
  bool run(const Operands& operands, at::Device device, cudaStream_t stream);

 private:
  struct Candidate {
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace_bytes;
  };

  bool launch(const Candidate& candidate, const Operands& operands,
              void* workspace, cudaStream_t stream);
  double milliseconds(const Candidate& candidate, const Operands& operands,
                      void* workspace, cudaStream_t stream);

  cublasLtHandle_t handle_;
  Key key_;
  cublasLtMatmulDesc_t description_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, addend_ = nullptr,
                         out_ = nullptr;
  std::vector<Candidate> candidates_;  // the one to use first
};

template <class Value>
bool set(cublasLtMatmulDesc_t description,
         cublasLtMatmulDescAttributes_t attribute, const Value& value) {
  return cublasLtMatmulDescSetAttribute(description, attribute, &value,
                                        sizeof value) == CUBLAS_STATUS_SUCCESS;
}

template <class Value>
bool set(cublasLtMatmulPreference_t preference,
         cublasLtMatmulPreferenceAttributes_t attribute, const Value& value) {
  return cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value,
                                              sizeof value) ==
         CUBLAS_STATUS_SUCCESS;
}

cublasLtMatrixLayout_t layout_of(const LtMatrix& matrix, at::ScalarType type,
                                 int64_t leading) {
  cublasLtMatrixLayout_t layout = nullptr;
  cublasLtMatrixLayoutCreate(&layout, cuda_type(type),
                             static_cast<uint64_t>(matrix.rows),
                             static_cast<uint64_t>(matrix.columns), leading);
  return layout;
}

// outᵀ = bᵀ aᵀ: cublasLt's first operand is b.
TunedProduct::TunedProduct(cublasLtHandle_t handle, const Key& key)
    : handle_(handle), key_(key) {
  const auto operation = [](const LtMatrix& matrix) {
    return matrix.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  };
  cublasLtMatmulDescCreate(&description_, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  a_ = layout_of(key.a, key.operand_type, key.a.leading);
  b_ = layout_of(key.b, key.operand_type, key.b.leading);
  out_ = layout_of(key.out, key.out_type, key.out.leading);
  addend_ =
      layout_of(key.out, key.out_type,
                key.addend_leading > 0 ? key.addend_leading : key.out.leading);
  cublasLtMatmulPreference_t preference = nullptr;
  cublasLtMatmulPreferenceCreate(&preference);
  bool good =
      set(description_, CUBLASLT_MATMUL_DESC_TRANSA, operation(key.b)) &&
      set(description_, CUBLASLT_MATMUL_DESC_TRANSB, operation(key.a));
  if (key.bias) {
    good = good &&
           set(description_, CUBLASLT_MATMUL_DESC_EPILOGUE,
               CUBLASLT_EPILOGUE_BIAS) &&
           set(description_, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
               static_cast<int32_t>(cuda_type(key.out_type)));
  }
  // Partial sums in float32 only.
  good = good &&
         set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
             static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)) &&
         set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
             uint64_t{kMaxWorkspaceBytes}) &&
         set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
             key.alignments[1]) &&
         set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
             key.alignments[0]) &&
         set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
             std::min(key.alignments[2], key.alignments[3])) &&
         set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
             key.alignments[3]);
  std::array<cublasLtMatmulHeuristicResult_t, kCandidates> found{};
  int count = 0;
  if (good && cublasLtMatmulAlgoGetHeuristic(
                  handle_, description_, b_, a_, addend_, out_, preference,
                  kCandidates, found.data(), &count) == CUBLAS_STATUS_SUCCESS) {
    const size_t most =
        count > 0 ? std::max(found[0].workspaceSize, kFreeWorkspaceBytes) : 0;
    for (int i = 0; i < count; ++i) {
      const auto& result = found[static_cast<size_t>(i)];
      if (result.state == CUBLAS_STATUS_SUCCESS &&
          result.workspaceSize <= most) {
        candidates_.push_back({result.algo, result.workspaceSize});
      }
    }
  }
  cublasLtMatmulPreferenceDestroy(preference);
}

bool TunedProduct::launch(const Candidate& candidate, const Operands& operands,
                          void* workspace, cudaStream_t stream) {
  const float one = 1, beta = key_.addend_leading > 0 ? 1 : 0;
  if (key_.bias) {
    set(description_, CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands.bias);
  }
  return cublasLtMatmul(
             handle_, description_, &one, operands.b, b_, operands.a, a_, &beta,
             operands.addend ? operands.addend : operands.out, addend_,
             operands.out, out_, &candidate.algorithm, workspace,
             candidate.workspace_bytes, stream) == CUBLAS_STATUS_SUCCESS;
}

/// Least time per run in two rows; infinite if a run fails.
double TunedProduct::milliseconds(const Candidate& candidate,
                                  const Operands& operands, void* workspace,
                                  cudaStream_t stream) {
  double best = std::numeric_limits<double>::infinity();
  int runs = 1;
  for (int row = 0; row < 4; ++row) {  // the first two load and estimate
    cudaEvent_t begin = nullptr, end = nullptr;
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    cudaEventRecord(begin, stream);
    bool good = true;
    for (int i = 0; i < runs && good; ++i) {
      good = launch(candidate, operands, workspace, stream);
    }
    cudaEventRecord(end, stream);
    float elapsed = 0;
    good = cudaEventSynchronize(end) == cudaSuccess && good &&
           cudaEventElapsedTime(&elapsed, begin, end) == cudaSuccess;
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    if (!good) return std::numeric_limits<double>::infinity();
    if (row == 1) {
      runs = std::clamp(static_cast<int>(kTrialMs / std::max(elapsed, 1e-3f)),
                        2, 20);
    } else if (row > 1) {
      best = std::min(best, static_cast<double>(elapsed) / runs);
    }
  }
  return best;
}

void TunedProduct::tune(const Operands& operands, cudaStream_t stream) {
  if (candidates_.size() < 2) return;
  size_t workspace_bytes = 0;
  for (const Candidate& candidate : candidates_) {
    workspace_bytes = std::max(workspace_bytes, candidate.workspace_bytes);
  }
  const size_t out_bytes = static_cast<size_t>(
      key_.out.leading * key_.out.columns *
      static_cast<int64_t>(c10::elementSize(key_.out_type)));
  if (key_.in_place && out_bytes > kMaxScratchBytes) return;
  cudaDeviceSynchronize();  // other streams would disturb
  const Scratch workspace(workspace_bytes);
  const Scratch sum(key_.in_place ? out_bytes : 0);
  if (workspace.failed() || sum.failed()) return;
  Operands trial = operands;
  if (key_.in_place) {
    // Values decide how much power a product takes, so that zeros would be too fast.
    cudaMemcpyAsync(sum.address(), operands.out, out_bytes,
                    cudaMemcpyDeviceToDevice, stream);
    trial.out = sum.address();
    trial.addend = sum.address();
  }
  const double first =
      milliseconds(candidates_[0], trial, workspace.address(), stream);
  double least = first * (1 - kNoise);
  size_t best = 0;
  for (size_t i = 1; i < candidates_.size(); ++i) {
    const double time =
        milliseconds(candidates_[i], trial, workspace.address(), stream);
    if (time < least) {
      least = time;
      best = i;
    }
  }
  std::swap(candidates_[0], candidates_[best]);
}

bool TunedProduct::run(const Operands& operands, at::Device device,
                       cudaStream_t stream) {
  if (candidates_.empty()) return false;
  const Candidate& candidate = candidates_[0];
  at::Tensor workspace;
  if (candidate.workspace_bytes > 0) {
    workspace = at::empty({static_cast<int64_t>(candidate.workspace_bytes)},
                          at::TensorOptions(at::kByte).device(device));
  }
  return launch(candidate, operands,
                workspace.defined() ? workspace.data_ptr() : nullptr, stream);
}

/// All products of the process.
struct Products {
  std::mutex mutex;
  std::map<int, cublasLtHandle_t> handles;  // per device; null: none
  std::map<Key, TunedProduct> products;
};

Products& products() {
  static auto* all = new Products;  // CUDA may end before static objects do
  return *all;
}

std::atomic<bool> g_allowed{true};

bool allowed() {
  return g_allowed && !at::globalContext().deterministicCuDNN() &&
         !at::globalContext().deterministicAlgorithms();
}

cublasLtHandle_t handle_of(Products& all, int device) {
  const auto [at, is_new] = all.handles.try_emplace(device, nullptr);
  if (is_new && cublasLtCreate(&at->second) != CUBLAS_STATUS_SUCCESS) {
    at->second = nullptr;
  }
  return at->second;
}

}  // namespace

bool lt_gemm_built() {
  return true;
}

void allow_lt_gemm(bool allowed) {
  g_allowed = allowed;
}

bool lt_gemm(const LtProduct& product) {
  if (!allowed()) return false;
  const auto key = key_of(product);
  if (!key) return false;
  const c10::DeviceGuard guard(product.a.device());
  auto* stream = static_cast<cudaStream_t>(current_cuda_stream(key->device));
  const auto address = [](const at::Tensor& tensor) -> const void* {
    return tensor.defined() ? tensor.data_ptr() : nullptr;
  };
  const Operands operands{address(product.a), address(product.b),
                          address(product.addend), address(product.bias),
                          product.out.data_ptr()};
  Products& all = products();
  const std::lock_guard lock(all.mutex);
  auto found = all.products.find(*key);
  if (found == all.products.end()) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(stream, &status) != cudaSuccess ||
        status != cudaStreamCaptureStatusNone) {
      return false;
    }
    cublasLtHandle_t handle = handle_of(all, key->device);
    if (handle == nullptr) return false;
    found = all.products
                .emplace(std::piecewise_construct, std::forward_as_tuple(*key),
                         std::forward_as_tuple(handle, *key))
                .first;
    found->second.tune(operands, stream);
  }
  return found->second.run(operands, product.a.device(), stream);
}

}  // namespace reprise::compat
