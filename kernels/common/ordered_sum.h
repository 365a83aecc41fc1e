#pragma once
#include <cstdint>

#include "core/dtype.h"
#include "kernels/common/launch.h"

namespace gdn::kernels {

// parts: `ranks` stretches of `elements` each, one behind the other. Element by element their sum (or
// maximum) in that order into `out`, which may be one of the parts; bf16 adds in fp32 and is rounded once.
// BF16, FP32, FP64, Int32 and Int64; Error{Usage} for other types.
void reduce_in_order(const void* parts, int ranks, std::int64_t elements, DType dtype, bool maximum, void* out, const LaunchContext& context);

} // namespace gdn::kernels
