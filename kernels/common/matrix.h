#pragma once
#include <cstdint>

#include "core/dtype.h"
#include "kernels/common/launch.h"

namespace gdn::kernels {

// rows x cols elements in device memory, `stride` elements from row to row. No data: absent.
struct Matrix {
  void* data = nullptr;
  DType dtype = DType::BF16;
  std::int64_t rows = 0, cols = 0, stride = 0;
};

// Where a gradient goes: written, or added to what is there (in fp32, rounded once).
struct Gradient {
  Matrix to;
  bool accumulate = false;
};

// The matrix's rows first .. first + count.
Matrix row_range(const Matrix& m, std::int64_t first, std::int64_t count);

} // namespace gdn::kernels
