// Compiled instead of lt_gemm.cpp if there is no cublasLt.
// Tested by tests/compat/lt_gemm_test.cpp.
#include "compat/lt_gemm.h"

namespace reprise::compat {

bool lt_gemm(const LtProduct&) {
  return false;
}

bool lt_gemm_built() {
  return false;
}

void allow_lt_gemm(bool) {}

}  // namespace reprise::compat
