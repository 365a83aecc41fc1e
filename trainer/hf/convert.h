#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace gdn::trainer::hf {

// n elements of `from` to `to`, BF16 or FP32 each; neither pointer needs to be aligned. To BF16 to
// nearest, ties to even; NaN stays NaN. BF16 to FP32 and back gives the same bits.
// Throws Error{Internal} for other dtypes.
void convert(DType from, const std::byte* in, DType to, std::byte* out, std::int64_t n);

} // namespace gdn::trainer::hf
