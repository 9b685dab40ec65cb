// Stands in for the kernels where nothing compiles CUDA.
#include "add_norm.h"
#include "column_sums.h"
#include "cross_entropy.h"
#include "image_conv.h"
#include "norm_relu.h"
#include "split_product.h"

#include <stdexcept>

namespace reprise::kernels {
namespace {

[[noreturn]] void not_built() {
  throw std::logic_error("[kernels] not in this build");
}

}  // namespace

bool add_norm_kernels_built() {
  return false;
}

int64_t RowsShape::parts() const {
  not_built();
}

void add_norm_forward(const RowsShape&, const float*, const void*, const float*,
                      const float*, double, float*, void*, float*, float*,
                      void*) {
  not_built();
}

void add_norm_backward(const RowsShape&, const float*, const void*,
                       const float*, const float*, const float*, const float*,
                       float*, float*, void*, float*, float*, void*) {
  not_built();
}

bool column_sums_kernel_built() {
  return false;
}

int64_t MatrixShape::parts() const {
  not_built();
}

void column_sums(const MatrixShape&, const void*, float*, float*, bool, void*) {
  not_built();
}

bool cross_entropy_kernels_built() {
  return false;
}

void cross_entropy_forward(const ScoresShape&, const void*, const int64_t*,
                           int64_t, float*, float*, int64_t*, void*) {
  not_built();
}

void cross_entropy_backward(const ScoresShape&, void*, const int64_t*, int64_t,
                            const float*, const float*, void*) {
  not_built();
}

bool image_conv_kernels_built() {
  return false;
}

bool ImageConv::fits() const {
  return false;
}

int64_t ImageConv::scratch() const {
  not_built();
}

void image_conv_forward(const ImageConv&, const float*, const float*,
                        const float*, float*, void*) {
  not_built();
}

void image_conv_backward(const ImageConv&, const float*, const float*, float*,
                         float*, float*, void*) {
  not_built();
}

bool norm_kernels_built() {
  return false;
}

int64_t NormShape::parts() const {
  not_built();
}

void norm_forward(const NormShape&, const NormTensors&, const NormRunning&,
                  double, float*, float*, uint8_t*, void*) {
  not_built();
}

void norm_backward(const NormShape&, const NormTensors&, const float*,
                   const uint8_t*, float*, float*, float*, float*, float*,
                   void*) {
  not_built();
}

bool SplitProduct::fits() const {
  return false;
}

bool split_product_runs(int) {
  return false;
}

void split_product(const SplitProduct&, int, void*) {
  not_built();
}

}  // namespace reprise::kernels
